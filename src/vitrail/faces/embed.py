"""Embeddings of faces: one unit vector an image, from any bundle."""

import hashlib
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitrail.bundles.bundle import Bundle, bundle_key
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.data.decode import read_file
from vitrail.data.prefetch import prefetch
from vitrail.faces.align import align, path_key, read_landmarks
from vitrail.inference.engine import Run, batch_for, cores
from vitrail.inference.registry import ENGINES

SMALLEST = 16
"""Pixels of the shorter side below which an image shows no face."""

Face = str | Path | np.ndarray
"""An image file, or its pixels: uint8 (height, width[, channels])."""


class Embedded(NamedTuple):
    """What is known of an image."""

    vector: np.ndarray
    """Unit vector (D), float32."""
    source: str
    """SHA-256 of the file, or of the pixels."""


class Embeddings(NamedTuple):
    """What is known of several images, in their order."""

    vectors: np.ndarray
    """Unit vectors (N, D), float32: the product of two is the cosine of their angle."""
    sources: tuple[str, ...]


class Aligner:
    """Aligns faces by the landmarks of a file, which names images by their path below one of the `roots`, or below its
    own folder."""

    def __init__(self, path: Path, roots: Iterable[str] = ()) -> None:
        self._points, self._roots = read_landmarks(path), (*roots, str(path.parent))

    def __call__(self, image: Image.Image | np.ndarray, name: str) -> Image.Image:
        """The aligned face."""
        names = [path_key(os.path.relpath(name, root)) for root in self._roots]
        points = next((self._points[one] for one in names if one in self._points), None)
        if points is None or not isinstance(image, Image.Image):
            raise UsageError(f"Landmarks must be given for every image, got none for {names[0]!r}.")
        try:
            return align(image, points)
        except UsageError as error:
            raise UsageError(f"{error} (in the landmarks of {names[0]!r})") from None


class Embedder:
    """Turns images into embeddings: the sum of the model's outputs for the image and for its mirror image, as a unit
    vector. Of a classifier, the output is the input of its head."""

    def __init__(
        self, bundle: Bundle | str | Path, *, device: str | None = None, aligner: Aligner | None = None
    ) -> None:
        key = bundle_key(bundle)
        self.key = key if aligner is None else hashlib.sha256(f"{key} aligned".encode()).hexdigest()
        """Hash of the bundle, another one for aligned faces: such embeddings cannot be compared with others."""
        self.name = "a model in memory" if isinstance(bundle, Bundle) else str(bundle)
        self._engine = ENGINES["torch"].open(bundle, device)
        self._engine.info.check_computable()
        self._preprocess = self._engine.info.preprocess
        if aligner is not None:  # landmarks are pixels of the whole image
            self._preprocess = self._preprocess.replace(jpeg="exact")
        self._align = aligner

    def embed(self, images: Iterable[Face], *, meter: Callable[[int], None] | None = None) -> Embeddings:
        """The embeddings of images. The first that cannot be read raises its error. `meter` is told how many are
        done."""
        found: list[Embedded] = []
        with closing(self.stream(images)) as every:
            for one in every:
                if isinstance(one, VitrailError):
                    raise one
                found.append(one)
                if meter is not None:
                    meter(len(found))
        if not found:
            raise UsageError("Images must be given, got none.")
        return Embeddings(np.stack([one.vector for one in found]), tuple(one.source for one in found))

    def stream(self, images: Iterable[Face]) -> Generator[Embedded | VitrailError]:
        """Yield the embedding of each image in order, or the error that prevented it."""
        size = batch_for(self._engine.info.config)
        jobs = (partial(self._prepare, number, image) for number, image in enumerate(images))
        with self._engine.running(None) as run, closing(prefetch(jobs, cores(), ahead=2 * size)) as prepared:
            while some := list(islice(prepared, size)):
                good = [one for one in some if not isinstance(one, VitrailError)]
                outputs = iter(self._compute(run, np.stack([crop for _, crop, _ in good])) if good else ())
                for one in some:
                    yield one if isinstance(one, VitrailError) else _unit(one[0], next(outputs), one[2])

    def _prepare(self, number: int, image: Face) -> tuple[str, np.ndarray, str] | VitrailError:
        """The name of an image, its pixels as the model takes them, and its hash."""
        preprocess = self._preprocess
        try:
            if isinstance(image, np.ndarray):
                name, content = f"image {number}", image
            else:
                name, content = str(image), read_file(image)
            decoded = preprocess.read(content, name=name)
            height, width = decoded.shape[:2] if isinstance(decoded, np.ndarray) else decoded.size[::-1]
            if min(height, width) < SMALLEST:
                raise UsageError(
                    f"Image of a face must have at least {SMALLEST} x {SMALLEST} pixels, got {width} x {height} in"
                    f" {name!r}."
                )
            if self._align is not None:
                decoded = self._align(decoded, name)
            source = hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).hexdigest()
            return name, preprocess.crop(decoded, name=name), source
        except VitrailError as error:
            return error

    def _compute(self, run: Run, pixels_BHWC: np.ndarray) -> np.ndarray:
        """The sum of the outputs for images and for their mirror images (B, D)."""
        has_head = self._engine.info.config.classes > 0
        one, mirrored = (
            outputs.features if has_head else outputs.logits
            for outputs in (run(pixels_BHWC), run(np.ascontiguousarray(pixels_BHWC[:, :, ::-1])))
        )
        return one + mirrored


def _unit(name: str, output: np.ndarray, source: str) -> Embedded | VitrailError:
    length = np.linalg.norm(output.astype(np.float64))
    if not np.isfinite(length) or length == 0:
        return CorruptFileError(f"Embedding of {name!r} must be finite and not zero, got length {length}.")
    return Embedded((output / length).astype(np.float32), source)
