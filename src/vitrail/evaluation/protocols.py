"""`vitrail evaluate`: scores of a bundle's own predictions, or of a classifier on its features."""

import dataclasses
import itertools
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.bundle import Bundle, open_to_compute
from vitrail.bundles.decision import MultiLabel
from vitrail.bundles.metadata import OVERFLOWS, BundleInfo
from vitrail.core.errors import CorruptFileError, UsageError, did_you_mean
from vitrail.core.settings import check_integer, sentence_case
from vitrail.core.terminal import Meter
from vitrail.core.watchdog import watch_step
from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import Loader
from vitrail.data.preprocess import ImageLike, Preprocess
from vitrail.data.sources.registry import AnyData, open_data
from vitrail.evaluation.feature_classifiers import (
    NEIGHBOURS,
    SHOTS,
    TEMPERATURE,
    fit_ridge,
    neighbour_votes,
    sample_shots,
)
from vitrail.evaluation.feature_classifiers import fit_probe as learn_probe
from vitrail.evaluation.features import FeatureStore, pooling_name
from vitrail.evaluation.labels import match_labels, note_match
from vitrail.evaluation.metrics import mean_interval, score_classes, score_labels
from vitrail.evaluation.split_predictions import SplitPredictions, collect_predictions
from vitrail.evaluation.splits import (
    HELD_OUT,
    EvaluationSplit,
    choose_split,
    have_same_images,
    note_on_held_out,
    note_on_training_images,
    training_and_held_out,
    was_trained_on,
)
from vitrail.inference.benchmark_store import Workload
from vitrail.inference.engine import DEFAULT_REQUEST, Engine, EngineRequest, cores
from vitrail.inference.registry import ENGINES
from vitrail.inference.select import choose_engine

Protocol = Literal["classify", "knn", "probe", "fewshot"]

_BATCH = 64
_HOLDOUT = 0.1  # of data without splits, as training holds out by default
_HELD_OUT_NAMES = (None, "val", "validation", HELD_OUT)  # what --split may be for data without splits
_READING = ("layer", "seed", "cache")
_SETTINGS: dict[Protocol, tuple[str, ...]] = {
    "classify": (),
    "knn": ("neighbours", "temperature"),
    "probe": ("penalty", "seed"),
    "fewshot": ("shots", "seeds", "seed", "penalty"),
}


def evaluate(
    bundle: Bundle | str | Path,
    data: AnyData,
    split: str | None = None,
    *,
    protocol: Protocol = "classify",
    workers: int = 2,
    device: str | None = None,
    request: EngineRequest = DEFAULT_REQUEST,
    outputs: "PredictionWriter | None" = None,
    **settings: Any,
) -> dict[str, Any]:
    """All scores of a bundle on data under a protocol, as `evaluate --json` prints them.

    `request` is how to run the model under the protocol classify, and `outputs` takes its predictions. `settings` are
    those of `read_examples` (layer, seed, cache) and of the protocol's own function; None stands for the default, and a
    setting that the protocol does not have is refused.
    """
    given = check_settings(protocol, settings)
    own = _SETTINGS[protocol]
    if protocol == "classify":
        engine = open_engine(bundle, data, split, request, device)
        if outputs is not None:
            outputs.check(engine.info)
        answered = evaluate_split(engine, data, split, workers=workers)
        scores = answered.scores()
        if outputs is not None:
            model = engine.info.config.name if isinstance(bundle, Bundle) else str(bundle)
            outputs.write(answered, scores, model=model, preprocess=engine.info.preprocess, workers=workers)
        return scores
    if request != DEFAULT_REQUEST:
        raise UsageError(f"Engine and precision must come with protocol classify, got {protocol}.")
    reading = {name: given[name] for name in _READING if name in given}
    examples = read_examples(bundle, data, split, workers=workers, device=device, **reading)
    judge = {"knn": knn, "probe": probe, "fewshot": fewshot}[protocol]
    return judge(examples, **{name: given[name] for name in own if name in given})


def check_settings(protocol: Protocol, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are given, not None; one that the protocol does not have is refused."""
    if protocol not in [*_SETTINGS]:
        near = did_you_mean(str(protocol), [*_SETTINGS])
        raise UsageError(f"Protocol must be one of {', '.join(_SETTINGS)}, got {protocol!r}.{near}")
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name not in _SETTINGS[protocol] and (protocol == "classify" or name not in _READING):
            fitting = [word for word, names in _SETTINGS.items() if name in names] or [*_SETTINGS][1:]
            raise UsageError(f"{sentence_case(name)} must come with protocol {' or '.join(fitting)}, got {protocol}.")
    return given


class SplitEvaluation(NamedTuple):
    """A bundle's own predictions on a split."""

    dataset: Dataset
    chosen: EvaluationSplit
    """The images, with the data's classes."""
    place: np.ndarray
    """The model's class of each class of the data."""
    names: tuple[str, ...]
    """Names of the model's classes."""
    answers: SplitPredictions
    """Predictions of the images, with the model's classes."""
    about: dict[str, Any]
    """Description of the data and of how classes were matched, as JSON."""
    thresholds: tuple[float, ...] | None = None
    """Of a bundle that answers with several labels."""

    @property
    def split(self) -> Split:
        """The images, with the data's classes."""
        return self.chosen.split

    def scores(self) -> dict[str, Any]:
        """All scores, as `evaluate --json` prints them."""
        if self.thresholds is not None:
            found = score_labels(self.answers.probabilities, self.answers.labels, self.names, self.thresholds)
            return {**self.about, **found}
        return {**self.about, **score_classes(self.answers.probabilities, self.answers.labels, self.names)}


def open_engine(
    bundle: Bundle | str | Path, data: AnyData, split: str | None, request: EngineRequest, device: str | None
) -> Engine:
    """The engine for a bundle and a split, as requested."""

    def choose_images(parts: BundleInfo) -> Sequence[ImageLike] | np.ndarray:
        return choose_split(open_data(data), split, parts.provenance).split.images

    workload = Workload(_BATCH, 1, cores())
    choice = choose_engine(request, bundle, workload=workload, choose_images=choose_images, device=device)
    return ENGINES[choice.engine].open(bundle, device, choice.precision)


class PredictionWriter(typing.Protocol):
    """What is made of the predictions of protocol classify besides the scores: files, pages, comparisons."""

    def check(self, info: BundleInfo) -> None:
        """Raise UsageError for a bundle whose predictions cannot be written. Called before the evaluation."""
        ...

    def write(
        self, evaluation: SplitEvaluation, scores: dict[str, Any], *, model: str, preprocess: Preprocess, workers: int
    ) -> None:
        """Write outputs of the predictions, and add their results to `scores`."""
        ...


def evaluate_split(
    engine: Engine, data: AnyData, split: str | EvaluationSplit | None, *, workers: int = 2
) -> SplitEvaluation:
    """The bundle's own predictions of each image of a split, once."""
    parts = engine.info
    parts.check_classifies()
    dataset = open_data(data)
    judged = split if isinstance(split, EvaluationSplit) else choose_split(dataset, split, parts.provenance)
    own = judged.split
    classes = parts.config.classes
    place, how = match_labels(parts.labels, classes, dataset.labels)
    thresholds = parts.answer.thresholds if isinstance(parts.answer, MultiLabel) else None
    if thresholds is None:
        dataset.check_one_label("A bundle that answers with one class")
    labels = map_labels(own.labels, place, classes, several=thresholds is not None)
    chosen = dataclasses.replace(own, labels=labels)
    names = parts.labels or tuple(map(str, range(classes)))
    notes = [*dataset.notes, *judged.notes, *note_match(parts.labels, classes, dataset.labels)]
    loader = Loader(chosen, parts.preprocess, batch=_BATCH, shuffle=False, workers=workers)
    with engine.running(None) as run:
        count = itertools.count(0, _BATCH)

        def compute(pixels: Tensor) -> Tensor:
            first = next(count)
            names = f"{chosen.image_name(first)!r} to {chosen.image_name(first + len(pixels) - 1)!r}"
            with watch_step(lambda: f"computing {names} with engine {engine.name}"):
                return torch.from_numpy(run(pixels.numpy()).logits)

        answers = collect_predictions(
            compute,
            loader,
            classes,
            parts.answer.probabilities,
            meter=Meter(len(chosen), "images"),
        )
    if not np.isfinite(answers.probabilities).all():
        raise CorruptFileError(OVERFLOWS)
    about = {"protocol": "classify", "data": dataset.name, **judged.about, "labels_matched": how, "notes": notes}
    return SplitEvaluation(dataset, judged, place, names, answers, about, thresholds)


def map_labels(labels: np.ndarray, place: np.ndarray, classes: int, *, several: bool) -> np.ndarray:
    """The data's labels as the bundle numbers them; one class for each image is a single label, if it has several."""
    if not several:
        return place[labels]
    table = np.zeros((len(labels), classes), np.uint8)
    if labels.ndim == 2:
        table[:, place] = labels
    else:
        table[np.arange(len(labels)), place[labels]] = 1
    return table


@dataclasses.dataclass(frozen=True)
class FeatureExamples:
    """Features and classes of training images and of test images."""

    features: np.ndarray
    labels: np.ndarray
    asked: np.ndarray
    truth: np.ndarray
    names: tuple[str, ...]
    about: dict[str, Any]
    """Description of the data and features, as JSON."""

    @property
    def classes(self) -> int:
        """Number of classes of the data, not of the bundle."""
        return len(self.names)


def read_examples(
    bundle: Bundle | str | Path,
    data: AnyData,
    split: str | None = None,
    *,
    layer: int | None = None,
    seed: int | None = None,
    cache: str | Path | None = None,
    workers: int = 2,
    device: str | None = None,
) -> FeatureExamples:
    """Features of the training images (`train`) and of the test images (`test`, otherwise `val`).

    If DATA has no splits, the test images are those that the bundle's training held out; of other data, or with a
    `seed`, those that training with this seed (0) would hold out.
    """
    loaded = open_to_compute(bundle, device=device)
    store = FeatureStore(loaded, bundle, layer=layer, folder=cache, workers=workers)
    dataset = open_data(data)
    dataset.check_one_label("Judging features")
    training, chosen = _divide_for(loaded.provenance, dataset, split, seed)
    judged = chosen.split
    features, asked = store.of(training), store.of(judged)
    about = {
        "data": dataset.name,
        **chosen.about,
        "train_count": len(training),
        "layer": store.layer,
        "pooling": pooling_name(loaded.model, store.layer),
        "features": features.shape[1],
        "cached": store.hits == 2,
        "notes": [*dataset.notes, *chosen.notes, *store.notes],
    }
    return FeatureExamples(features, training.labels, asked, judged.labels, dataset.labels, about)


def _divide_for(
    provenance: dict[str, Any], dataset: Dataset, split: str | None, seed: int | None
) -> tuple[Split, EvaluationSplit]:
    """`divide` for a bundle: data without splits is divided as its training divided it, unless there is a seed."""
    training, judged = choose_train_and_test(dataset, split, 0 if seed is None else seed)
    if judged.name != HELD_OUT or not was_trained_on(dataset, provenance):
        return training, EvaluationSplit(judged)
    parts = training_and_held_out(dataset, provenance)
    if parts is not None and seed is None:
        return parts[0], EvaluationSplit(parts[1], notes=(note_on_held_out(parts[1]),))
    trained_on = parts is None or not have_same_images(parts[1], judged)
    return training, EvaluationSplit(judged, trained_on, (note_on_training_images(),) if trained_on else ())


def choose_train_and_test(dataset: Dataset, split: str | None, seed: int) -> tuple[Split, Split]:
    """Training images and test images, which never overlap."""
    seed = check_integer("seed", seed, low=0, high=2**63 - 1)
    if dataset.splits.keys() <= {"all", "train"}:
        if split not in _HELD_OUT_NAMES:
            raise UsageError(
                f"Split must be val, a held-out share, for data without splits, got {split!r} for {dataset.name!r}."
            )
        training, judged = dataset.for_training(holdout=_HOLDOUT, seed=seed)
        if judged is None:
            raise UsageError(f"Data must have a class of at least 2 images, got none in {dataset.name!r}.")
        return training, judged
    training, _ = dataset.for_training(holdout=0, seed=seed)
    judged = dataset.for_evaluation(split)
    if judged.name == training.name:
        raise UsageError(f"Split must not be {judged.name}, which is trained on. Use test or val.")
    return training, judged


def knn(
    examples: FeatureExamples, *, neighbours: int | None = None, temperature: float = TEMPERATURE
) -> dict[str, Any]:
    """All scores of a vote of the nearest training images, by default 20 or all if there are fewer."""
    e = examples
    neighbours = min(NEIGHBOURS, len(e.features)) if neighbours is None else neighbours
    neighbours = check_integer("neighbours", neighbours, low=1, high=len(e.features))
    shares = neighbour_votes(
        e.features, e.labels, e.asked, classes=e.classes, neighbours=neighbours, temperature=temperature
    )
    return {
        "protocol": "knn",
        **e.about,
        "neighbours": neighbours,
        "temperature": temperature,
        **score_classes(shares, e.truth, e.names),
    }


def probe(examples: FeatureExamples, *, penalty: float | None = None, seed: int = 0) -> dict[str, Any]:
    """All scores of a logistic regression on the features."""
    e = examples
    found, penalty = learn_probe(e.features, e.labels, classes=e.classes, penalty=penalty, seed=seed)
    return {
        "protocol": "probe",
        **e.about,
        "penalty": penalty,
        **score_classes(found.probabilities(e.asked), e.truth, e.names),
    }


def fewshot(
    examples: FeatureExamples,
    *,
    shots: Sequence[int] | None = None,
    seeds: int = 5,
    seed: int = 0,
    penalty: float | None = None,
) -> dict[str, Any]:
    """The paper's few-shot protocol: least squares from a few images of each class, finally from all.

    `shots` has a row for each number of images per class: the mean accuracy over `seeds` random choices and its 95 %
    interval (Student's, over the choices). The other scores are those of the last row, with all images.
    """
    e = examples
    seeds = check_integer("seeds", seeds, low=1, high=1000)
    counts = np.bincount(e.labels, minlength=e.classes)
    notes = list(e.about["notes"])
    given = {
        check_integer("shots", number, low=1, high=int(counts.max())) for number in (() if shots is None else shots)
    }
    rows = []
    for number in sorted(given or set(SHOTS)):
        if number > counts.max():
            notes.append(f"{number} shots are left out: no class has more than {counts.max():,} training images")
            continue
        if short := [name for name, count in zip(e.names, counts, strict=True) if count < number]:
            listed = ", ".join(short[:5]) + (", ..." if len(short) > 5 else "")
            notes.append(f"{number} shots: {len(short)} of {e.classes} classes have fewer, all were taken ({listed})")
        rows.append({"shots": number, **_few(e, number, range(seed, seed + seeds), penalty), "fewer": short})
    found, penalty = fit_ridge(e.features, e.labels, classes=e.classes, penalty=penalty)
    final = score_classes(found(e.asked), e.truth, e.names, calibrated=False)
    return {
        "protocol": "fewshot",
        **e.about,
        "notes": notes,
        "seeds": seeds,
        "shots": rows,
        "penalty": penalty,
        **final,
    }


def _few(e: FeatureExamples, shots: int, seeds: Sequence[int], penalty: float | None) -> dict[str, Any]:
    accuracies, penalties = [], []
    for seed in seeds:
        drawn = sample_shots(e.labels, shots, seed)
        found, chosen = fit_ridge(e.features[drawn], e.labels[drawn], classes=e.classes, penalty=penalty)
        accuracies.append(float((found(e.asked).argmax(axis=1) == e.truth).mean()))
        penalties.append(chosen)
    interval = mean_interval(accuracies)
    return {
        "train_count": len(drawn),
        "accuracy": float(np.mean(accuracies)),
        "accuracy_interval": None if interval is None else [max(interval[0], 0.0), min(interval[1], 1.0)],
        "accuracies": accuracies,
        "penalties": penalties,
    }
