"""Embeddings of face images: one unit vector per image, from any bundle."""

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
from vitrail.inference.engine import Run, batch_for, thread_count
from vitrail.inference.registry import ENGINES

MIN_SIDE = 16
"""Fewest pixels of the shorter side of a face image. Smaller images are rejected."""

FaceImage = str | Path | np.ndarray
"""An image file, or pixels: uint8 (height, width[, channels])."""


class Embedding(NamedTuple):
    """Embedding of one face image."""

    vector: np.ndarray
    """Unit vector (D), float32."""
    source: str
    """SHA-256 of the image file, or of the pixels."""


class Embeddings(NamedTuple):
    """Embeddings of several face images, in the order of the images."""

    vectors: np.ndarray
    """Unit vectors (N, D), float32. The score of two images is the dot product of their vectors, the cosine."""
    sources: tuple[str, ...]
    """SHA-256 of each image."""


class Aligner:
    """Aligns faces by the landmarks of a file.

    The file names images by their path relative to one of the folders `roots`, or to the folder of the file itself.
    """

    def __init__(self, path: Path, roots: Iterable[str] = ()) -> None:
        self._landmarks, self._roots = read_landmarks(path), (*roots, str(path.parent))

    def __call__(self, image: Image.Image | np.ndarray, name: str) -> Image.Image:
        """Return the aligned face of the image with this path. Raises UsageError if it has no landmarks."""
        keys = [path_key(os.path.relpath(name, root)) for root in self._roots]
        points = next((self._landmarks[key] for key in keys if key in self._landmarks), None)
        if points is None or not isinstance(image, Image.Image):
            raise UsageError(f"Landmarks must be given for every image, got none for {keys[0]!r}.")
        try:
            return align(image, points)
        except UsageError as error:
            raise UsageError(f"{error} (in the landmarks of {keys[0]!r})") from None


class Embedder:
    """Computes embeddings of face images with the model of a bundle.

    An embedding is the sum of the model's outputs for the image and for its mirror image, scaled to length 1. For a
    classifier, the output is the features that the head reads.
    """

    def __init__(
        self, bundle: Bundle | str | Path, *, device: str | None = None, aligner: Aligner | None = None
    ) -> None:
        key = bundle_key(bundle)
        self.key = key if aligner is None else hashlib.sha256(f"{key} aligned".encode()).hexdigest()
        """Hash of the bundle. Aligned faces have another key: their embeddings cannot be compared with others."""
        self.name = "a model in memory" if isinstance(bundle, Bundle) else str(bundle)
        self._engine = ENGINES["torch"].open(bundle, device)
        self._engine.info.check_computable()
        self._preprocess = self._engine.info.preprocess
        if aligner is not None:  # landmarks are pixels of the full-size image, which a reduced decoding would not give
            self._preprocess = self._preprocess.replace(jpeg="exact")
        self._aligner = aligner

    def embed(self, images: Iterable[FaceImage], *, meter: Callable[[int], None] | None = None) -> Embeddings:
        """Return the embeddings of images. Raises the error of the first image that cannot be read.

        `meter` is called with the number of finished images after each image.
        """
        embeddings: list[Embedding] = []
        with closing(self.stream(images)) as results:
            for result in results:
                if isinstance(result, VitrailError):
                    raise result
                embeddings.append(result)
                if meter is not None:
                    meter(len(embeddings))
        if not embeddings:
            raise UsageError("Images must be given, got none.")
        vectors = np.stack([embedding.vector for embedding in embeddings])
        return Embeddings(vectors, tuple(embedding.source for embedding in embeddings))

    def stream(self, images: Iterable[FaceImage]) -> Generator[Embedding | VitrailError]:
        """Yield the embedding of each image in order, or the error if the image cannot be read."""
        size = batch_for(self._engine.info.config)
        jobs = (partial(self._prepare, number, image) for number, image in enumerate(images))
        with self._engine.running(None) as run, closing(prefetch(jobs, thread_count(), ahead=2 * size)) as prepared:
            while batch := list(islice(prepared, size)):
                inputs = [item for item in batch if not isinstance(item, VitrailError)]
                crops = [crop for _, crop, _ in inputs]
                outputs = iter(self._sum_with_mirrored(run, np.stack(crops)) if crops else ())
                for item in batch:
                    yield item if isinstance(item, VitrailError) else _normalise(item[0], next(outputs), item[2])

    def _prepare(self, number: int, image: FaceImage) -> tuple[str, np.ndarray, str] | VitrailError:
        """Return the name of an image, its pixels as model input, and its hash; or the error if it cannot be read."""
        preprocess = self._preprocess
        try:
            if isinstance(image, np.ndarray):
                name, content = f"image {number}", image
            else:
                name, content = str(image), read_file(image)
            decoded = preprocess.read(content, name=name)
            height, width = decoded.shape[:2] if isinstance(decoded, np.ndarray) else decoded.size[::-1]
            if min(height, width) < MIN_SIDE:
                raise UsageError(
                    f"Image of a face must have at least {MIN_SIDE} x {MIN_SIDE} pixels, got {width} x {height} in"
                    f" {name!r}."
                )
            if self._aligner is not None:
                decoded = self._aligner(decoded, name)
            source = hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).hexdigest()
            return name, preprocess.crop(decoded, name=name), source
        except VitrailError as error:
            return error

    def _sum_with_mirrored(self, run: Run, pixels_BHWC: np.ndarray) -> np.ndarray:
        """Return the sum of the model's outputs for images and for their mirror images (B, D)."""
        has_head = self._engine.info.config.classes > 0
        plain, mirrored = (
            outputs.features if has_head else outputs.logits
            for outputs in (run(pixels_BHWC), run(np.ascontiguousarray(pixels_BHWC[:, :, ::-1])))
        )
        return plain + mirrored


def _normalise(name: str, output: np.ndarray, source: str) -> Embedding | VitrailError:
    """Scale the output for an image to length 1; return an error if it is zero or not finite."""
    length = np.linalg.norm(output.astype(np.float64))
    if not np.isfinite(length) or length == 0:
        return CorruptFileError(f"Embedding of {name!r} must be finite and not zero, got length {length}.")
    return Embedding((output / length).astype(np.float32), source)
