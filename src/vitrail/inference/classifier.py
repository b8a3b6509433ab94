"""`Classifier`: a bundle that predicts the classes of images. `Prediction`: what it predicts for one of them."""

import contextlib
import dataclasses
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice, tee
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, overload

import numpy as np
from PIL import Image

from vitrail.bundles.metadata import OVERFLOWS
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.settings import check_integer
from vitrail.core.watchdog import watch_step
from vitrail.data.prefetch import prefetch
from vitrail.data.preprocess import ImageLike
from vitrail.data.thumbnail import thumbnail_data_url
from vitrail.inference.engine import DEFAULT_REQUEST, EngineChoice, EngineRequest, Run, batch_for, thread_count
from vitrail.inference.registry import ENGINES

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle

Entry = dict[str, Any]
"""A predicted class as `{"label", "score"}`."""
ImageResult = tuple[list[Entry], np.ndarray, str] | VitrailError
"""Predictions, features and thumbnail (or "") of an image; or the error that prevented them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction(Sequence[Entry]):
    """The prediction for one image. It is also a sequence of `{"label", "score"}` for its classes, best first.

    >>> (prediction,) = vitrail.Classifier("fashion").predict([np.zeros((28, 28), np.uint8)], top_k=2)
    >>> len(prediction), prediction[0] == {"label": prediction.label, "score": prediction.score}
    (2, True)
    """

    file: str
    """Path of the image; "image 3" for an array."""
    label: str | None
    """The most probable class; None if the image could not be read."""
    score: float | None
    """Probability of the label."""
    classes: tuple[tuple[str, float], ...] = dataclasses.field(repr=False)
    """The most probable classes with their probabilities, best first."""
    error: str | None = None
    """Reason why the image could not be classified; None if it was."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Return the prediction in a row of `Classifier.stream`."""
        classes = tuple((entry["label"], entry["score"]) for entry in row.get("predictions", ()))
        label, score = classes[0] if classes else (None, None)
        return cls(file=row["file"], label=label, score=score, classes=classes, error=row.get("error"))

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as a line of `vitrail predict --json`."""
        if self.error is not None:
            return {"file": self.file, "error": self.error}
        return {"file": self.file, "predictions": list(self)}

    def __len__(self) -> int:
        return len(self.classes)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        return [{"label": label, "score": score} for label, score in self.classes][index]


class Predictions(list[Prediction]):
    """A list of `Prediction`, displayed as a table in a notebook."""

    labels: tuple[str, ...] = ()
    """The model's classes."""
    total: int = 0
    """Number of images, including those that were passed to a receiver."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return the lines of `vitrail predict --json`."""
        return [prediction.to_json() for prediction in self]

    def _repr_html_(self) -> str:
        from vitrail.core.notebook import bar, table

        rows = [
            (prediction.file, prediction.error)
            if prediction.label is None
            else (prediction.file, prediction.label, bar(prediction.score or 0.0))
            for prediction in self[:_NOTEBOOK_ROWS]
        ]
        return table(("image", "class", "probability"), rows, max(len(self) - _NOTEBOOK_ROWS, 0))


_NOTEBOOK_ROWS = 20  # predictions in the table of a notebook


class PredictionOptions(NamedTuple):
    """Options that select the predicted classes of an image. None: the default of the bundle."""

    top_k: int | None
    threshold: float | None


class Classifier:
    """A bundle that predicts the classes of images, which are paths, Pillow images or arrays.

    The bundle is a path or a loaded `Bundle`. The engines `onnx` and `openvino` run a bundle on disk: they build and
    verify a model file on first use, and do not import torch after that. `precision` is float32 (exact), bfloat16 or
    int8, if the engine has it. `auto` for the engine or the precision selects the fastest for many images, by
    measurement; a precision is selected only if at most a share `tolerance` of the predictions changes. `threads` is
    the number of computing threads (default: all cores). `jpeg` overrides how the bundle's preprocessing decodes JPEG
    files. `device` is where torch computes (default: auto, the accelerator that torch finds, or the device of a loaded
    model).

        >>> classifier = vitrail.Classifier("fashion")
        >>> (prediction,) = classifier.predict([np.zeros((28, 28), np.uint8)], top_k=2)
        >>> prediction.file, prediction.label in classifier.labels, len(prediction.classes)
        ('image 0', True, 2)
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
            threads = thread_count(check_integer("threads", threads, low=1, high=4096))
        self.threads = threads
        choice = EngineChoice(engine, precision)
        if "auto" in choice:
            from vitrail.inference.select import choose_engine

            choice = choose_engine(EngineRequest(*choice, tolerance), bundle, threads=threads, device=device)
        self._engine = ENGINES[choice.engine].open(bundle, device, choice.precision)
        self._decoding_lock = Lock()
        self.info = info = self._engine.info
        info.check_computable()
        self.config = info.config
        self.preprocess = info.preprocess if jpeg is None else info.preprocess.replace(jpeg=jpeg)
        self.labels = info.labels or tuple(map(str, range(info.config.classes)))
        self._has_classes = info.classifies

    def predict(
        self,
        images: Iterable[ImageLike],
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        batch_size: int | None = None,
    ) -> Predictions:
        """Return a `Prediction` for each image, with the `top_k` most probable classes (default: 5).

        A bundle that predicts several labels returns all labels whose probability reaches the `threshold` (default:
        each label's own, stored in the bundle). Raises the error of the first image that cannot be read.
        """
        is_single = isinstance(images, np.ndarray) and images.ndim < 3
        if is_single or isinstance(images, str | bytes | Path | Image.Image) or not isinstance(images, Iterable):
            raise UsageError(f"Images must be a list, got one {type(images).__name__}. Put it in brackets.")
        self.info.check_classifies()
        images, named_images = tee(images)
        predictions = Predictions()
        with contextlib.closing(self._classify(images, PredictionOptions(top_k, threshold), batch_size)) as results:
            for result, (number, image) in zip(results, enumerate(named_images), strict=True):
                if isinstance(result, VitrailError):
                    raise result
                predictions.append(Prediction.of({"file": _image_name(number, image), "predictions": result[0]}))
        predictions.labels, predictions.total = self.labels, len(predictions)
        return predictions

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
        """Yield `{"file", "predictions"}` or `{"file", "error"}` for each image, in order and as soon as it is ready.

        `features=True` adds "features", the input of the head. `thumbnails=True` adds "thumbnail", a data URL of the
        image as the model sees it. A model that does not classify has features and no predictions. Images that are not
        files need `names`.
        """
        if not features and not self._has_classes:
            self.info.check_classifies()
        options = PredictionOptions(top_k, threshold)
        with contextlib.closing(self._classify(files, options, batch_size, thumbnails)) as results:
            for file, result in zip(files if names is None else names, results, strict=True):
                if isinstance(result, VitrailError):
                    yield {"file": file, "error": str(result)}
                    continue
                predictions, features_D, thumbnail = result
                row = {"file": file, "predictions": predictions}
                if features:
                    row["features"] = features_D
                if thumbnails:
                    row["thumbnail"] = thumbnail
                yield row

    def _classify(
        self, images: Iterable[ImageLike], options: PredictionOptions, batch_size: int | None, thumbnails: bool = False
    ) -> Generator[ImageResult]:
        """Yield the predictions, features and thumbnail of each image, or its error, in order.

        Every thread decodes and classifies its own images, so that no core waits for another. If there are fewer images
        than threads, each image is computed with several threads.
        """
        if options.top_k is not None:
            check_integer("top_k", options.top_k, low=1, high=10_000_000)
        if options.threshold is not None:
            self.info.answer.check_threshold(options.threshold)
        if batch_size is not None:
            check_integer("batch_size", batch_size, low=1, high=1_000_000)
        threads = self.threads or thread_count()
        numbered = enumerate(images)
        # The first results are ready soonest if each thread starts with a single image.
        first_batches = [[numbered_image] for numbered_image in islice(numbered, threads)]
        if not first_batches:
            return
        callers = len(first_batches)
        with self._engine.running(threads // callers, callers) as run:
            if callers == 1 < threads:
                yield from self._classify_batch(first_batches[0], run, options, thumbnails)
                return
            size = batch_size or batch_for(self.config)
            other_batches = iter(lambda: list(islice(numbered, size)), [])
            jobs = (
                partial(self._classify_batch, batch, run, options, thumbnails)
                for batch in chain(first_batches, other_batches)
            )
            with contextlib.closing(prefetch(jobs, callers, ahead=2 * callers)) as batches:
                for results in batches:
                    yield from results

    def _classify_batch(
        self, numbered: list[tuple[int, ImageLike]], run: Run, options: PredictionOptions, thumbnails: bool
    ) -> list[ImageResult]:
        """Decode, crop and classify the images of a batch, which come with their numbers."""
        crops: list[np.ndarray | VitrailError] = []
        for number, image in numbered:
            try:
                # A Pillow image is decoded when it is first used, and two threads may get the same image.
                lock = self._decoding_lock if isinstance(image, Image.Image) else contextlib.nullcontext()
                with watch_step(partial(_describe_decoding, number, image)), lock:
                    crops.append(self.preprocess.crop(image, name=f"image {number}"))
            except VitrailError as error:
                crops.append(error)
        decoded = [crop for crop in crops if isinstance(crop, np.ndarray)]
        with watch_step(partial(self._describe_computing, numbered)):
            outputs = iter(zip(*run(np.stack(decoded)), strict=True) if decoded else ())
        return [
            crop
            if isinstance(crop, VitrailError)
            else self._format_result(*next(outputs), thumbnail_data_url(crop) if thumbnails else "", options)
            for crop in crops
        ]

    def _describe_computing(self, numbered: list[tuple[int, ImageLike]]) -> str:
        first, last = (_quote_name(*numbered[index]) for index in (0, -1))
        names = first if len(numbered) == 1 else f"{first} to {last}"
        return f"computing {names} with engine {self._engine.name}"

    def _format_result(
        self, logits_K: np.ndarray, features_D: np.ndarray, thumbnail: str, options: PredictionOptions
    ) -> ImageResult:
        """Return the labels and scores of the predicted classes of an image, with its features and thumbnail."""
        if not np.isfinite(logits_K).all():
            return CorruptFileError(OVERFLOWS)
        if not self._has_classes:
            return [], features_D, thumbnail
        scores_K = self.info.answer.scores(logits_K)
        chosen = self.info.answer.choose(scores_K, *options)
        predictions: list[Entry] = [{"label": self.labels[index], "score": float(scores_K[index])} for index in chosen]
        return predictions, features_D, thumbnail


def _image_name(number: int, image: ImageLike) -> str:
    """Return the path of an image, or `image 3` for one that is not a file."""
    return str(image) if isinstance(image, str | Path) else f"image {number}"


def _quote_name(number: int, image: ImageLike) -> str:
    """Return the name of an image for a message, where a path is quoted."""
    return repr(str(image)) if isinstance(image, str | Path) else _image_name(number, image)


def _describe_decoding(number: int, image: ImageLike) -> str:
    return f"decoding {_quote_name(number, image)}"
