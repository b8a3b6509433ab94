"""Scores of a bundle on data, and the classes of images: evaluate, predict."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from vitrail.api.flags import (
    BundlePath,
    Data,
    Device,
    EngineName,
    Precision,
    Tolerance,
    command,
    file_flag,
    folder_flag,
)
from vitrail.core.errors import UsageError
from vitrail.core.flags import argument, flag, python_only
from vitrail.core.settings import check_integer
from vitrail.core.terminal import Meter
from vitrail.data.image_files import are_image_files, name_images
from vitrail.evaluation.predictions.prediction_tables import table_endings

if TYPE_CHECKING:
    from vitrail.bundles.metadata import BundleInfo
    from vitrail.data.preprocess import ImageLike
    from vitrail.evaluation.protocols import Protocol


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """Scores of a bundle on data."""

    accuracy: float
    """Share of images whose class was predicted; of several labels, of those with all labels right."""
    accuracy_interval: tuple[float, float]
    """Its 95 % interval (Wilson's)."""
    count: int
    """Number of images."""
    top5: float | None
    """Share of images whose class is among the five most probable; None for several labels."""
    ece: float | None
    """Expected calibration error; None if the protocol has no probabilities."""
    split: str
    """Which images: test, val, held-out, all, ..."""
    scores: dict[str, Any]
    """All scores, as `vitrail evaluate --json` prints them: also `per_class`, `confusion` and `notes`."""
    map: float | None = None
    """Mean average precision, if the bundle answers with several labels."""
    trained_on: bool = False
    """Whether the bundle was trained on images among these, as far as its provenance says."""

    @property
    def right(self) -> int:
        """Number of images whose class was predicted."""
        return round(self.accuracy * self.count)

    @property
    def notes(self) -> list[str]:
        """What to know about the data and the scores."""
        return self.scores["notes"]

    def to_json(self) -> dict[str, Any]:
        """All scores."""
        return self.scores

    def __repr__(self) -> str:
        trained_on = ", training images" if self.trained_on else ""
        if self.map is not None:
            return f"Evaluation({self.split} mAP {self.map:.1%}, {self.count:,} images{trained_on})"
        low, high = self.accuracy_interval
        calibration = "" if self.ece is None else f", calibration error {self.ece:.3f}"
        return (
            f"Evaluation({self.split} accuracy {self.accuracy:.1%}, {self.right:,} of {self.count:,}, 95 % interval"
            f" {low:.1%} to {high:.1%}{calibration}{trained_on})"
        )

    def _repr_html_(self) -> str:
        from vitrail.core.notebook import card

        low, high = self.accuracy_interval
        rows = [
            (
                "accuracy",
                f"{self.accuracy:.1%} ({self.right:,} of {self.count:,}; 95 % interval {low:.1%} to {high:.1%})",
            ),
            *([] if self.map is None else [("mean average precision", f"{self.map:.1%}")]),
            *([] if self.top5 is None else [("top 5", f"{self.top5:.1%}")]),
            *([] if self.ece is None else [("calibration error", f"{self.ece:.3f}")]),
        ]
        what = f"{self.split} images" + (" (training images)" if self.trained_on else "")
        return card(what, rows, "vitrail.evaluate")


@command
def evaluate(
    bundle: BundlePath,
    data: Data,
    split: Annotated[
        str | None,
        flag(
            "train, val, test, all or held-out; default: test, otherwise val, otherwise the images that the"
            " bundle's training held out of DATA, otherwise all images.",
            metavar="S",
        ),
    ] = None,
    *,
    protocol: Annotated[
        "Protocol",
        flag(
            "classify: the bundle's own predictions. The others fit a classifier of DATA's classes on the frozen"
            " model's features of the train split: knn, nearest neighbours; probe, logistic regression; fewshot, the"
            " paper's least squares from a few images of each class.",
            cli_type=Literal["classify", "knn", "probe", "fewshot"],
        ),
    ] = "classify",
    layer: Annotated[
        int | None,
        flag(
            "Use the output of this layer as features, from 0 or from the end (-1): [CLS] or the mean. Default:"
            " the input of the head.",
            metavar="N",
        ),
    ] = None,
    neighbours: Annotated[int | None, flag("knn: number of neighbours (20).", metavar="K")] = None,
    temperature: Annotated[
        float | None, flag("knn: weight of a vote exp(similarity / T) (0.07); 0: equal weights.", metavar="T")
    ] = None,
    shots: Annotated[
        Sequence[int] | None,
        flag(
            "fewshot: numbers of images per class (1 5 10 25); then all.", metavar="K", cli_type=tuple[int, ...] | None
        ),
    ] = None,
    seeds: Annotated[int | None, flag("fewshot: random choices of images for each number (5).", metavar="N")] = None,
    penalty: Annotated[
        float | None,
        flag("probe, fewshot: L2 penalty; default: chosen on held-out images or by leave-one-out.", metavar="L"),
    ] = None,
    seed: Annotated[
        int | None,
        flag(
            "Seed of the held-out share of data without splits (by default as in the bundle's training), of probe"
            " and of fewshot (0).",
            metavar="S",
        ),
    ] = None,
    cache: Annotated[
        str | Path | None,
        folder_flag("Cache of features (~/.cache/vitrail/features); it can be deleted at any time."),
    ] = None,
    engine: EngineName = "torch",
    precision: Precision = "float32",
    tolerance: Tolerance = 0.02,
    workers: Annotated[int, flag("Number of threads that decode and prepare images.", metavar="N")] = 2,
    device: Device = None,
    output: Annotated[
        str | Path | None,
        file_flag(
            f"Also write each image's label and answers: a file that ends in {', '.join(table_endings())}; or .npz, to"
            " compare them later, as in a run."
        ),
    ] = None,
    page: Annotated[
        str | Path | None, folder_flag("Also write pages of all mistakes; labels that are likely wrong first.")
    ] = None,
    against: Annotated[
        str | Path | None,
        flag(
            "Another bundle, or answers of one: which is better, by a paired test?", metavar="BUNDLE|NPZ", cli_type=str
        ),
    ] = None,
    force: Annotated[bool, flag("Overwrite FILE and DIR.")] = False,
) -> Evaluation:
    """Evaluate a bundle on data: accuracy with its interval, top 5, calibration, each class; of several labels, mAP.

    >>> found = vitrail.evaluate("fashion", "fashion-40")
    >>> found.count, found.right == round(40 * found.accuracy), found.accuracy > 0.8
    (40, True, True)
    """
    settings: dict[str, Any] = {
        "layer": layer,
        "neighbours": neighbours,
        "temperature": temperature,
        "shots": shots,
        "seeds": seeds,
        "penalty": penalty,
        "seed": seed,
        "cache": cache,
    }
    outputs = None
    paths = {"output": output and Path(output), "page": page and Path(page), "against": against and str(against)}
    if asked := [name for name, path in paths.items() if path is not None]:
        if protocol != "classify":
            raise UsageError(f"--{asked[0]} must come with --protocol classify, got {protocol}.")
        from vitrail.reports.evaluation_outputs import EvaluationOutputs

        outputs = EvaluationOutputs.open(**cast(dict[str, Any], paths), force=force, device=device)
    from vitrail.evaluation.protocols import evaluate as judge
    from vitrail.inference.engine import EngineRequest

    request = EngineRequest(engine, precision, tolerance)
    scores = judge(
        bundle,
        data,
        split,
        protocol=protocol,
        workers=workers,
        device=device,
        request=request,
        outputs=outputs,
        **settings,
    )
    low, high = scores["accuracy_interval"]
    names = ("accuracy", "count", "top5", "ece", "split", "map", "trained_on")
    kept: dict[str, Any] = {name: scores.get(name) for name in names}
    return Evaluation(**kept, accuracy_interval=(low, high), scores=scores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for one image."""

    file: str
    """Path of the image; "image 3" if it was given as an array."""
    label: str | None
    """The most probable class; None if the image could not be read."""
    score: float | None
    """Its probability."""
    classes: tuple[tuple[str, float], ...] = dataclasses.field(repr=False)
    """The most probable classes with their probabilities, best first."""
    error: str | None = None
    """Why the image could not be classified."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """The prediction of a row of `Classifier.stream`."""
        classes = tuple((label["label"], label["score"]) for label in row.get("predictions", ()))
        label, score = classes[0] if classes else (None, None)
        return cls(file=row["file"], label=label, score=score, classes=classes, error=row.get("error"))

    def to_json(self) -> dict[str, Any]:
        """A line of `vitrail predict --json`."""
        if self.error is not None:
            return {"file": self.file, "error": self.error}
        return {"file": self.file, "predictions": [{"label": label, "score": score} for label, score in self.classes]}


class Predictions(list[Prediction]):
    """A list of `Prediction`, which a notebook shows as a table."""

    labels: tuple[str, ...] = ()
    """The model's classes."""
    total: int = 0
    """Number of images, with those that were passed to a receiver."""

    def to_json(self) -> list[dict[str, Any]]:
        """The lines of `vitrail predict --json`."""
        return [prediction.to_json() for prediction in self]

    def _repr_html_(self) -> str:
        from vitrail.core.notebook import bar, table

        rows = [
            (one.file, one.error) if one.label is None else (one.file, one.label, bar(one.score or 0.0))
            for one in self[:_SHOWN]
        ]
        return table(("image", "class", "probability"), rows, max(len(self) - _SHOWN, 0))


_SHOWN = 20  # predictions in a notebook

Receiver = Callable[[Sequence[str], Sequence[str], "BundleInfo"], Callable[[Prediction], object]]
"""Called with the names of all images, the labels and the bundle's metadata before the first prediction; what it
returns is called with each prediction."""


@command
def predict(
    bundle: BundlePath,
    images: Annotated[
        "ImageLike | Iterable[ImageLike]",
        argument(
            "Images, folders of them, quoted patterns such as 'photos/**/*.jpg', a data set alone (.npz, .csv,"
            " digits, ...), or - for names from stdin, one per line.",
            metavar="FILE|DIR|GLOB|DATA|-",
            cli_type=tuple[str, ...],
            python="Or pixels (n, height, width[, channels]), uint8, an array or a tensor; or a list of arrays, Pillow"
            " images, or files in bytes.",
        ),
    ],
    *,
    top_k: Annotated[
        int | None,
        flag("Number of classes to show for each image (5); of several labels, the most to show.", metavar="K"),
    ] = None,
    threshold: Annotated[
        float | None,
        flag(
            "For a bundle that answers with several labels: show those with at least this probability; default:"
            " each label's own, stored in BUNDLE.",
            metavar="T",
        ),
    ] = None,
    engine: EngineName = "torch",
    precision: Precision = "float32",
    tolerance: Tolerance = 0.02,
    threads: Annotated[
        int | None, flag("Number of threads that decode and compute; default: every core.", metavar="N")
    ] = None,
    device: Device = None,
    jpeg: Annotated[
        Literal["exact", "double"] | None,
        flag(
            "Decode JPEG files exactly, or (double) large ones at a reduced scale, faster; default: as in BUNDLE.",
            metavar="{exact,double}",
        ),
    ] = None,
    features: Annotated[
        str | Path | None,
        flag(
            "Also write features, the input of the head: arrays `files` and `features`.",
            metavar="OUT.npz",
            cli_type=Path,
        ),
    ] = None,
    output: Annotated[
        str | Path | None,
        file_flag(f"Write the answers to a file that ends in {', '.join(table_endings())}, a row an image."),
    ] = None,
    page: Annotated[
        str | Path | None, folder_flag("Write a contact sheet: pages of all images by their answer.")
    ] = None,
    sort: Annotated[
        Literal["uncertain", "confident"] | None,
        flag("Order of the answers, when all are known; default: as given.", metavar="{uncertain,confident}"),
    ] = None,
    split: Annotated[
        str | None, flag("Of a data set: train, val or test; default: as in evaluate.", metavar="S")
    ] = None,
    force: Annotated[bool, flag("Overwrite OUT.npz, FILE and DIR.")] = False,
    receiver: Annotated[
        Receiver | None,
        python_only(
            "For a stream of predictions: called with the names of all images, the labels and the bundle's metadata;"
            " what it returns is called with each prediction as soon as it is known. The result then has only the"
            " images that could not be classified."
        ),
    ] = None,
) -> Predictions:
    """Classify images. Files that cannot be read are reported, the others classified; the exit code is then 1.

    With --output or --page, the answers go there instead of to the terminal.

        >>> answers = vitrail.predict("fashion", np.zeros((3, 28, 28), np.uint8), top_k=2)
        >>> len(answers), answers[2].file, len(answers[2].classes), 0 < answers[2].score < 1
        (3, 'image 2', 2, True)
    """
    if top_k is not None:
        top_k = check_integer("top_k", top_k, low=1, high=10_000_000)
    outputs = None
    if any((features, output, page, sort)):
        from vitrail.reports.prediction_outputs import PredictionOutputs

        paths: dict[str, Any] = {"table": output, "page": page, "features": features}
        paths = {name: Path(path) for name, path in paths.items() if path is not None}
        outputs = PredictionOutputs(**paths, sort=sort, force=force)
        outputs.check()
    chosen, names = _open_images(images, split)
    from vitrail.inference.classifier import Classifier
    from vitrail.inference.engine import DEFAULT_REQUEST, EngineRequest

    request = EngineRequest(engine, precision, tolerance)
    if request != DEFAULT_REQUEST:
        from vitrail.inference.select import choose_engine

        engine, precision = choose_engine(request, bundle, images=chosen, threads=threads, device=device)
    classifier = Classifier(bundle, engine=engine, precision=precision, threads=threads, jpeg=jpeg, device=device)
    parts = classifier.info
    parts.answer.check_threshold(threshold)
    if outputs is not None and outputs.need_classes:
        parts.check_single_label("--output, --page and --sort")
    if hasattr(images, "shape") and not isinstance(chosen[0], str):  # all pixels are wrong if the first ones are
        classifier.preprocess.read(chosen[0])
    result = Predictions()
    result.labels, result.total = classifier.labels, len(names)
    receive = result.append if receiver is None else receiver(names, classifier.labels, parts)
    rows = classifier.stream(
        chosen,
        names=names,
        top_k=top_k,
        threshold=threshold,
        features=features is not None,
        thumbnails=page is not None,
    )
    meter = Meter(len(names), "images") if len(names) > 1 else None
    if meter is not None:
        rows = _metered(rows, meter)
    if outputs is not None:
        model = str(bundle) if isinstance(bundle, str | Path) else parts.config.name or parts.config.family
        rows = outputs.write(rows, model=model, top_k=min(top_k or 5, len(classifier.labels)))
    with contextlib.closing(rows):
        for row in rows:
            prediction = Prediction.of(row)
            if receiver is not None and meter is not None and sys.stdout.isatty():  # they share the terminal
                meter.clear()
            receive(prediction)
            if receiver is not None and prediction.error is not None:
                result.append(prediction)
    return result


def _open_images(images: "ImageLike | Iterable[ImageLike]", split: str | None) -> tuple[Any, list[str]]:
    """The images and the name of each: those of a data set, or files and arrays."""
    words = [images] if isinstance(images, str | os.PathLike) else images
    if isinstance(words, list | tuple) and all(isinstance(word, str | os.PathLike) for word in words):
        paths = [str(word) for word in words]
        if paths and split is None and are_image_files(paths):
            return paths, paths
        from vitrail.data.sources.registry import open_named_split

        if (data := open_named_split(paths, split)) is not None:
            return data.images, [data.image_name(index) for index in range(len(data))]
    return name_images(images)


def _metered(rows: Iterable[dict[str, Any]], meter: Meter) -> Generator[dict[str, Any]]:
    """The rows; the meter is told of each when it has been taken."""
    with meter:
        for done, row in enumerate(rows, 1):
            yield row
            meter(done)
