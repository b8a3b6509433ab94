"""`Classifier`: a bundle that predicts the classes of images."""

import contextlib
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from vitrail.bundles.metadata import OVERFLOWS
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.settings import check_integer
from vitrail.core.watchdog import watch_step
from vitrail.data.prefetch import prefetch
from vitrail.data.preprocess import ImageLike
from vitrail.data.thumbnail import thumbnail_data_url
from vitrail.inference.engine import DEFAULT_REQUEST, EngineChoice, EngineRequest, Run, batch_for, cores, limit_threads
from vitrail.inference.registry import ENGINES

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle

Named = list[dict[str, str | float]]
Answer = tuple[Named, np.ndarray, str] | VitrailError
"""Predictions, features and, if asked for, the thumbnail of an image; or the error that prevented them."""


class Wanted(NamedTuple):
    """What of the scores predictions name; None stands for the bundle's default."""

    top_k: int | None
    threshold: float | None


class Classifier:
    """A bundle that predicts the classes of images: paths, Pillow images or arrays. The bundle is a path, or a `Bundle`
    that is already loaded.

    Engines `onnx` and `openvino` run a bundle on disk: the file they need is made and verified on first use; after
    that, torch is not imported. `precision` is float32, which is exact, bfloat16 or int8, where the engine has it. With
    `auto` for either, the fastest for many images is taken, by measurement; of precisions, the fastest that changes at
    most the share `tolerance` of answers. `threads` is the number of computing threads (default: every core); `jpeg`
    overrides how the bundle's preprocessing decodes JPEG files; `device` is where torch computes (default: auto, the
    accelerator that torch finds, or the device of a loaded model).

        >>> classifier = vitrail.Classifier("fashion")
        >>> (answer,) = classifier.predict([np.zeros((28, 28), np.uint8)], top_k=2)
        >>> [sorted(one) for one in answer]
        [['label', 'score'], ['label', 'score']]
    """

    def __init__(
        self,
        bundle: "Bundle | str | Path",
        *,
        engine: str = "torch",
        precision: str = "float32",
        tolerance: float = DEFAULT_REQUEST.tolerance,
        threads: int | None = None,
        jpeg: Literal["exact", "double"] | None = None,
        device: str | None = None,
    ) -> None:
        if threads is not None:
            threads = limit_threads(check_integer("threads", threads, low=1, high=4096))
        self.threads = threads
        choice = EngineChoice(engine, precision)
        if "auto" in choice:
            from vitrail.inference.select import choose_engine

            choice = choose_engine(EngineRequest(*choice, tolerance), bundle, threads=threads, device=device)
        self._engine = ENGINES[choice.engine].open(bundle, device, choice.precision)
        self._decoding = Lock()
        self.info = info = self._engine.info
        info.check_computable()
        self.config = info.config
        self.preprocess = info.preprocess if jpeg is None else info.preprocess.replace(jpeg=jpeg)
        self.labels = info.labels or tuple(map(str, range(info.config.classes)))
        self._names = info.classifies

    def predict(
        self,
        images: Iterable[ImageLike],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        batch_size: int | None = None,
    ) -> list[Named]:
        """For each image, the `top_k` most probable classes (default: 5), best first: `[{"label": "cat", "score":
        0.93}, ...]`. Of a bundle that answers with several labels, all those with at least the `threshold` (default:
        each label's own, stored in the bundle). The first image that cannot be read raises its error."""
        is_one = isinstance(images, np.ndarray) and images.ndim < 3
        if is_one or isinstance(images, str | bytes | Path | Image.Image) or not isinstance(images, Iterable):
            raise UsageError(f"Images must be a list, got one {type(images).__name__}. Put it in brackets.")
        self.info.check_classifies()
        found = []
        with contextlib.closing(self._answers(images, Wanted(top_k, threshold), batch_size)) as answers:
            for answer in answers:
                if isinstance(answer, VitrailError):
                    raise answer
                found.append(answer[0])
        return found

    def stream(
        self,
        files: Sequence[ImageLike] | np.ndarray,
        *,
        names: Iterable[str] | None = None,
        top_k: int | None = None,
        threshold: float | None = None,
        batch_size: int | None = None,
        features: bool = False,
        thumbnails: bool = False,
    ) -> Generator[dict[str, Any]]:
        """Yield for each image file, in order and as soon as it is ready, `{"file", "predictions"}`; or
        `{"file", "error"}`. `features=True` adds "features", the input of the head, and `thumbnails=True` adds
        "thumbnail", a data URL of the image as the model sees it. A model that does not classify has features and no
        predictions. Images that are no files need `names`."""
        if not features:
            self.info.check_classifies()
        with contextlib.closing(self._answers(files, Wanted(top_k, threshold), batch_size, thumbnails)) as answers:
            for file, answer in zip(files if names is None else names, answers, strict=True):
                if isinstance(answer, VitrailError):
                    yield {"file": file, "error": str(answer)}
                    continue
                named, row, small = answer
                asked = ({"features": row} if features else {}) | ({"thumbnail": small} if thumbnails else {})
                yield {"file": file, "predictions": named, **asked}

    def _answers(
        self, images: Iterable[ImageLike], wanted: Wanted, batch_size: int | None, thumbnails: bool = False
    ) -> Generator[Answer]:
        """Yield for each image, in order, its predictions and features, or its error. Every thread decodes and
        classifies its own images, so that no core waits for another. If there are fewer images than threads, each image
        is computed with several threads.
        """
        if wanted.top_k is not None:
            check_integer("top_k", wanted.top_k, low=1, high=10_000_000)
        self.info.answer.check_threshold(wanted.threshold)
        if batch_size is not None:
            check_integer("batch_size", batch_size, low=1, high=1_000_000)
        threads = self.threads or cores()
        numbered = enumerate(images)
        # The first answers come soonest if each thread begins with one image.
        first = [[one] for one in islice(numbered, threads)]
        if not first:
            return
        with self._engine.running(threads // len(first), len(first)) as run:
            if len(first) == 1 < threads:
                yield from self._answer(first[0], run, wanted, thumbnails)
                return
            size = batch_size or batch_for(self.config)
            rest = iter(lambda: list(islice(numbered, size)), [])
            jobs = (partial(self._answer, piece, run, wanted, thumbnails) for piece in chain(first, rest))
            with contextlib.closing(prefetch(jobs, len(first), ahead=2 * len(first))) as done:
                for answers in done:
                    yield from answers

    def _answer(
        self, numbered: list[tuple[int, ImageLike]], run: Run, wanted: Wanted, thumbnails: bool
    ) -> list[Answer]:
        crops: list[np.ndarray | VitrailError] = []
        for number, image in numbered:
            try:
                # A Pillow image is decoded when it is first used, and two threads may be given the same one.
                alone = self._decoding if isinstance(image, Image.Image) else contextlib.nullcontext()
                with watch_step(partial(_describe_decoding, number, image)), alone:
                    crops.append(self.preprocess.crop(image, name=f"image {number}"))
            except VitrailError as error:
                crops.append(error)
        good = [crop for crop in crops if isinstance(crop, np.ndarray)]
        with watch_step(partial(self._describe_computing, numbered)):
            outputs = iter(zip(*run(np.stack(good)), strict=True) if good else ())
        return [
            crop
            if isinstance(crop, VitrailError)
            else self._name(*next(outputs), thumbnail_data_url(crop) if thumbnails else "", wanted)
            for crop in crops
        ]

    def _describe_computing(self, numbered: list[tuple[int, ImageLike]]) -> str:
        first, last = (_name_image(*numbered[place]) for place in (0, -1))
        names = first if len(numbered) == 1 else f"{first} to {last}"
        return f"computing {names} with engine {self._engine.name}"

    def _name(self, logits_K: np.ndarray, row: np.ndarray, small: str, wanted: Wanted) -> Answer:
        if not np.isfinite(logits_K).all():
            return CorruptFileError(OVERFLOWS)
        if not self._names:
            return [], row, small
        scores_K = self.info.answer.scores(logits_K)
        best = self.info.answer.choose(scores_K, *wanted)
        return [{"label": self.labels[index], "score": float(scores_K[index])} for index in best], row, small


def _name_image(number: int, image: ImageLike) -> str:
    return repr(str(image)) if isinstance(image, str | Path) else f"image {number}"


def _describe_decoding(number: int, image: ImageLike) -> str:
    return f"decoding {_name_image(number, image)}"
