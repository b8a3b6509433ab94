"""The commands `evaluate` and `predict`."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from vitrail.api.parameters import (
    BundlePath,
    Corrections,
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
from vitrail.core.flags import SPEED, argument, flag, python_only
from vitrail.core.settings import check_integer
from vitrail.core.terminal import Meter
from vitrail.data.image_files import SUFFIXES, name_images
from vitrail.data.sources.registry import with_corrections
from vitrail.evaluation.predictions.prediction_tables import table_endings

if TYPE_CHECKING:
    from vitrail.bundles.metadata import BundleInfo
    from vitrail.data.preprocess import ImageLike
    from vitrail.evaluation.protocols import Protocol
    from vitrail.inference.classifier import Prediction, Predictions


def __getattr__(name: str) -> Any:
    """Return `Prediction` or `Predictions`, whose module takes a quarter of a second to import."""
    if name not in ("Prediction", "Predictions"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vitrail.inference import classifier

    return getattr(classifier, name)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """Scores of a bundle on data."""

    accuracy: float
    """Share of images whose class was predicted; with several labels per image, share with all labels right."""
    accuracy_interval: tuple[float, float]
    """95 % interval of the accuracy (Wilson's)."""
    count: int
    """Number of images."""
    top5: float | None
    """Share of images whose class is among the five most probable; None with several labels per image."""
    ece: float | None
    """Expected calibration error; None if the protocol has no probabilities."""
    split: str
    """Images that were used: test, val, held-out, all, ..."""
    scores: dict[str, Any]
    """All scores, as `vitrail evaluate --json` prints them, with `per_class`, `confusion` and `notes`."""
    map: float | None = None
    """Mean average precision, if the bundle predicts several labels per image."""
    trained_on: bool = False
    """Whether the images were in the bundle's training set, according to its provenance."""

    @property
    def right(self) -> int:
        """Return the number of images whose class was predicted."""
        return round(self.accuracy * self.count)

    @property
    def notes(self) -> list[str]:
        """Return notes about the data and the scores."""
        return self.scores["notes"]

    def to_json(self) -> dict[str, Any]:
        """Return all scores, as `vitrail evaluate --json` prints them."""
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
        title = f"{self.split} images" + (" (training images)" if self.trained_on else "")
        return card(title, rows, "vitrail.evaluate")


_FEATURES = "with --protocol knn, probe or fewshot"


@command
def evaluate(
    bundle: BundlePath,
    data: Data,
    split: Annotated[
        str | None,
        flag(
            "Images of DATA to use: train, val, test, all or held-out. Default: the first that exists of test, val and"
            " the images that the bundle's training held out of DATA; otherwise all.",
            metavar="S",
        ),
    ] = None,
    *,
    corrections: Corrections = None,
    protocol: Annotated[
        "Protocol",
        flag(
            "classify: evaluate the predictions of the bundle. The others fit a classifier to features of the train"
            " split: knn, nearest neighbours; probe, logistic regression; fewshot, least squares from a few images per"
            " class, as in the ViT paper.",
            cli_type=Literal["classify", "knn", "probe", "fewshot"],
        ),
    ] = "classify",
    layer: Annotated[
        int | None,
        flag(
            "Layer whose output ([CLS] or the mean) is used as features, counted from 0 or from the end (-1). Default:"
            " the input of the head.",
            metavar="N",
            group=_FEATURES,
        ),
    ] = None,
    neighbours: Annotated[int | None, flag("knn: number of neighbours (20).", metavar="K", group=_FEATURES)] = None,
    temperature: Annotated[
        float | None,
        flag("knn: a vote has the weight exp(similarity / T) (0.07); 0: equal weights.", metavar="T", group=_FEATURES),
    ] = None,
    shots: Annotated[
        Sequence[int] | None,
        flag(
            "fewshot: numbers of images per class (1 5 10 25). All images are always used, too.",
            metavar="K",
            group=_FEATURES,
            cli_type=tuple[int, ...] | None,
        ),
    ] = None,
    seeds: Annotated[
        int | None, flag("fewshot: how many times to draw the images at random (5).", metavar="N", group=_FEATURES)
    ] = None,
    penalty: Annotated[
        float | None,
        flag(
            "probe, fewshot: L2 penalty; default: chosen on held-out images or by leave-one-out.",
            metavar="L",
            group=_FEATURES,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        flag(
            "Random seed of probe, fewshot (0) and the held-out share of data without splits (default: as in the"
            " bundle's training).",
            metavar="S",
            group=_FEATURES,
        ),
    ] = None,
    cache: Annotated[
        str | Path | None,
        folder_flag("Cache of features (~/.cache/vitrail/features). It can be deleted at any time.", group=_FEATURES),
    ] = None,
    engine: EngineName = "torch",
    precision: Precision = "float32",
    tolerance: Tolerance = 0.02,
    workers: Annotated[int, flag("Number of threads that prepare images.", metavar="N", group=SPEED)] = 2,
    device: Device = None,
    output: Annotated[
        str | Path | None,
        file_flag(
            f"Also write label and predictions of each image, to a table ({', '.join(table_endings())}) or to an .npz"
            " file for a later comparison with --against."
        ),
    ] = None,
    page: Annotated[
        str | Path | None, folder_flag("Also write pages of all mistakes, likely wrong labels first.")
    ] = None,
    against: Annotated[
        str | Path | None,
        flag(
            "Another bundle, or its predictions, to compare with by a paired test.", metavar="BUNDLE|NPZ", cli_type=str
        ),
    ] = None,
    force: Annotated[bool, flag("Overwrite FILE and DIR.")] = False,
) -> Evaluation:
    """Measure the accuracy and calibration of a bundle.

    Prints accuracy with its 95 % interval, top 5, calibration error and the accuracy of each class; with several labels
    per image, mean average precision.

    >>> evaluation = vitrail.evaluate("fashion", "fashion-40")
    >>> evaluation.count, evaluation.right == round(40 * evaluation.accuracy), evaluation.accuracy > 0.8
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
    if output_names := [name for name, path in paths.items() if path is not None]:
        if protocol != "classify":
            raise UsageError(f"--{output_names[0]} must be used with --protocol classify, got {protocol}.")
        from vitrail.reports.evaluation_outputs import EvaluationOutputs

        outputs = EvaluationOutputs.open(**cast(dict[str, Any], paths), force=force, device=device)
    from vitrail.evaluation.protocols import evaluate as run
    from vitrail.inference.engine import EngineRequest

    request = EngineRequest(engine, precision, tolerance)
    scores = run(
        bundle,
        with_corrections(data, corrections),
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
    main_scores: dict[str, Any] = {name: scores.get(name) for name in names}
    return Evaluation(**main_scores, accuracy_interval=(low, high), scores=scores)


Receiver = Callable[[Sequence[str], Sequence[str], "BundleInfo"], Callable[["Prediction"], object]]
"""Function that is called with the names of all images, the labels and the bundle's metadata before the first
prediction. It returns a function that is called with each prediction."""


@command
def predict(
    bundle: BundlePath,
    images: Annotated[
        "ImageLike | Iterable[ImageLike]",
        argument(
            "Images, folders of images, quoted patterns such as 'photos/**/*.jpg', or - to read paths from stdin, one"
            " per line. Or one data set (.npz, .csv, digits, ...).",
            metavar="FILE|DIR|GLOB|DATA|-",
            cli_type=tuple[str, ...],
            python="Or pixels (n, height, width[, channels]), uint8, an array or a tensor; or a list of arrays, Pillow"
            " images or encoded files (bytes).",
        ),
    ],
    *,
    top_k: Annotated[
        int | None,
        flag("Number of classes to show for each image (5); with several labels per image, the maximum.", metavar="K"),
    ] = None,
    threshold: Annotated[
        float | None,
        flag(
            "With several labels per image: show labels with at least this probability. Default: the threshold of each"
            " label, stored in BUNDLE.",
            metavar="T",
        ),
    ] = None,
    engine: EngineName = "torch",
    precision: Precision = "float32",
    tolerance: Tolerance = 0.02,
    threads: Annotated[
        int | None, flag("Number of threads that decode and compute; default: all cores.", metavar="N", group=SPEED)
    ] = None,
    device: Device = None,
    jpeg: Annotated[
        Literal["exact", "double"] | None,
        flag(
            "Decode JPEG files exactly, or large files faster at a reduced scale (double); default: as in BUNDLE.",
            metavar="{exact,double}",
            group=SPEED,
        ),
    ] = None,
    features: Annotated[
        str | Path | None,
        flag(
            "Also write the features (input of the head) of each image, as arrays `files` and `features`.",
            metavar="OUT.npz",
            cli_type=Path,
        ),
    ] = None,
    output: Annotated[
        str | Path | None,
        file_flag(f"Write the predictions to a table ({', '.join(table_endings())}), one row per image."),
    ] = None,
    page: Annotated[
        str | Path | None, folder_flag("Write a contact sheet: pages of all images, grouped by prediction.")
    ] = None,
    sort: Annotated[
        Literal["uncertain", "confident"] | None,
        flag(
            "Order of the predictions, printed after all are computed; default: order of the images.",
            metavar="{uncertain,confident}",
        ),
    ] = None,
    split: Annotated[
        str | None,
        flag(
            "Split of a data set: train, val or test; default: test, otherwise val, otherwise all images.", metavar="S"
        ),
    ] = None,
    force: Annotated[bool, flag("Overwrite OUT.npz, FILE and DIR.")] = False,
    receiver: Annotated[
        Receiver | None,
        python_only(
            "Function for a stream of predictions. It is called with the names of all images, the labels and the"
            " bundle's metadata, and returns a function that is called with each prediction as soon as it is computed."
            " The result then has only the images that could not be classified."
        ),
    ] = None,
) -> "Predictions":
    """Classify images.

    With --output or --page, predictions are written to files and not printed. If files cannot be read, they are
    reported, the others are classified, and the exit code is 1.

        >>> predictions = vitrail.predict("fashion", np.zeros((3, 28, 28), np.uint8), top_k=2)
        >>> len(predictions), predictions[2].file, len(predictions[2].classes), 0 < predictions[2].score < 1
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
    inputs, names = _open_images(images, split)
    from vitrail.inference.classifier import Classifier, Prediction, Predictions
    from vitrail.inference.engine import DEFAULT_REQUEST, EngineRequest

    request = EngineRequest(engine, precision, tolerance)
    if request != DEFAULT_REQUEST:
        from vitrail.inference.select import choose_engine

        engine, precision = choose_engine(request, bundle, images=inputs, threads=threads, device=device)
    classifier = Classifier(bundle, engine=engine, precision=precision, threads=threads, jpeg=jpeg, device=device)
    info = classifier.info
    if threshold is not None:
        info.answer.check_threshold(threshold)
    if outputs is not None and outputs.need_classes:
        info.check_single_label("--output, --page and --sort")
    if hasattr(images, "shape") and not isinstance(
        inputs[0], str
    ):  # raise an error if the array has a wrong type or shape
        classifier.preprocess.read(inputs[0])
    result = Predictions()
    result.labels, result.total = classifier.labels, len(names)
    receive = result.append if receiver is None else receiver(names, classifier.labels, info)
    rows = classifier.stream(
        inputs,
        names=names,
        top_k=top_k,
        threshold=threshold,
        features=features is not None,
        thumbnails=page is not None,
    )
    meter = Meter(len(names), "images") if len(names) > 1 else None
    if meter is not None:
        rows = _with_meter(rows, meter)
    if outputs is not None:
        model = str(bundle) if isinstance(bundle, str | Path) else info.config.name or info.config.family
        labels = classifier.labels
        rows = outputs.write(rows, inputs, model=model, classes=labels, top_k=min(top_k or 5, len(labels)))
    with contextlib.closing(rows):
        for row in rows:
            prediction = Prediction.of(row)
            if receiver is not None and meter is not None and sys.stdout.isatty():  # both are printed to the terminal
                meter.clear()
            receive(prediction)
            if receiver is not None and prediction.error is not None:
                result.append(prediction)
    return result


def _open_images(images: "ImageLike | Iterable[ImageLike]", split: str | None) -> tuple[Any, list[str]]:
    """Return images and their names, from the `images` argument of `predict`: files, arrays or one data set."""
    items = [images] if isinstance(images, str | os.PathLike) else images
    if isinstance(items, list | tuple) and all(isinstance(item, str | os.PathLike) for item in items):
        paths = [str(item) for item in items]
        # Path.is_file raises an error for some invalid names.
        are_images = (path.rpartition(".")[2].lower() in SUFFIXES and os.path.isfile(path) for path in paths)  # noqa: PTH113
        if paths and split is None and all(are_images):
            return paths, paths
        from vitrail.data.sources.registry import open_named_split

        if (data := open_named_split(paths, split)) is not None:
            return data.images, [data.image_name(index) for index in range(len(data))]
    return name_images(images)


def _with_meter(rows: Iterable[dict[str, Any]], meter: Meter) -> Generator[dict[str, Any]]:
    """Yield the rows, and update the meter after the consumer of each row is done."""
    with meter:
        for done, row in enumerate(rows, 1):
            yield row
            meter(done)
