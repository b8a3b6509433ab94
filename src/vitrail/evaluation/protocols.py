"""Protocols of `vitrail evaluate`: scores of a bundle's own predictions, or of a classifier on its features."""

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
    fit_probe,
    fit_ridge,
    neighbour_votes,
    sample_shots,
)
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
from vitrail.inference.engine import DEFAULT_REQUEST, Engine, EngineRequest, thread_count
from vitrail.inference.registry import ENGINES
from vitrail.inference.select import choose_engine

Protocol = Literal["classify", "knn", "probe", "fewshot"]

_BATCH = 64
_HOLDOUT = 0.1  # share of data without splits that training holds out by default
_HELD_OUT_NAMES = (None, "val", "validation", HELD_OUT)  # values of --split for data without splits
_FEATURE_SETTINGS = ("layer", "seed", "cache")  # of `read_examples`, for all protocols on features
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
    """Return all scores of a bundle on data under a protocol, as `evaluate --json` prints them.

    Protocol classify scores the bundle's own predictions: `request` selects the engine, and `outputs` writes the
    predictions. The other protocols score a classifier on its features: they ignore `outputs`, and their `settings` are
    the arguments of `read_examples` (layer, seed, cache) and of `knn`, `probe` or `fewshot`. A setting that is None has
    its default value. Raises UsageError for a setting that the protocol does not have, and for a `request` with another
    protocol than classify.
    """
    settings = check_settings(protocol, settings)
    if protocol == "classify":
        engine = open_engine(bundle, data, split, request, device)
        if outputs is not None:
            outputs.check(engine.info)
        evaluation = evaluate_split(engine, data, split, workers=workers)
        scores = evaluation.scores()
        if outputs is not None:
            model = engine.info.config.name if isinstance(bundle, Bundle) else str(bundle)
            outputs.write(evaluation, scores, model=model, preprocess=engine.info.preprocess, workers=workers)
        return scores
    if request != DEFAULT_REQUEST:
        raise UsageError(f"Engine and precision must be used with protocol classify, got {protocol}.")
    feature_settings = {name: settings[name] for name in _FEATURE_SETTINGS if name in settings}
    examples = read_examples(bundle, data, split, workers=workers, device=device, **feature_settings)
    score = {"knn": knn, "probe": probe, "fewshot": fewshot}[protocol]
    return score(examples, **{name: settings[name] for name in _SETTINGS[protocol] if name in settings})


def check_settings(protocol: Protocol, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None. Raises UsageError for a setting that the protocol does not have."""
    if protocol not in [*_SETTINGS]:
        suggestion = did_you_mean(str(protocol), [*_SETTINGS])
        raise UsageError(f"Protocol must be one of {', '.join(_SETTINGS)}, got {protocol!r}.{suggestion}")
    settings = {name: value for name, value in settings.items() if value is not None}
    for name in settings:
        if name not in _SETTINGS[protocol] and (protocol == "classify" or name not in _FEATURE_SETTINGS):
            protocols = [key for key, names in _SETTINGS.items() if name in names] or [*_SETTINGS][1:]
            raise UsageError(
                f"{sentence_case(name)} must be used with protocol {' or '.join(protocols)}, got {protocol}."
            )
    return settings


class SplitEvaluation(NamedTuple):
    """A bundle's own predictions on a split."""

    dataset: Dataset
    evaluation_split: EvaluationSplit
    """The images, with the data's classes."""
    class_indices: np.ndarray
    """The model's class for each class of the data."""
    names: tuple[str, ...]
    """Names of the model's classes."""
    predictions: SplitPredictions
    """Predictions for the images, with the model's classes."""
    about: dict[str, Any]
    """Description of the data and of how classes were matched, as JSON."""
    thresholds: tuple[float, ...] | None = None
    """Thresholds of the labels, if the bundle predicts several labels."""

    @property
    def split(self) -> Split:
        """The images, with the data's classes."""
        return self.evaluation_split.split

    def scores(self) -> dict[str, Any]:
        """Return all scores, as `evaluate --json` prints them."""
        probabilities, labels = self.predictions.probabilities, self.predictions.labels
        if self.thresholds is not None:
            return {**self.about, **score_labels(probabilities, labels, self.names, self.thresholds)}
        return {**self.about, **score_classes(probabilities, labels, self.names)}


def open_engine(
    bundle: Bundle | str | Path, data: AnyData, split: str | None, request: EngineRequest, device: str | None
) -> Engine:
    """Open a bundle with the requested engine. `auto` compares engines on images of the split."""

    def choose_images(info: BundleInfo) -> Sequence[ImageLike] | np.ndarray:
        return choose_split(open_data(data), split, info.provenance).split.images

    workload = Workload(_BATCH, 1, thread_count())
    choice = choose_engine(request, bundle, workload=workload, choose_images=choose_images, device=device)
    return ENGINES[choice.engine].open(bundle, device, choice.precision)


class PredictionWriter(typing.Protocol):
    """Interface of the additional outputs of protocol classify: files, pages and comparisons of predictions."""

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
    """Predict each image of a split once with a bundle's own head.

    `split` is a name, None for the default, or already chosen. Raises CorruptFileError if probabilities are not finite.
    """
    info = engine.info
    info.check_classifies()
    dataset = open_data(data)
    chosen = split if isinstance(split, EvaluationSplit) else choose_split(dataset, split, info.provenance)
    classes = info.config.classes
    class_indices, matching = match_labels(info.labels, classes, dataset.labels)
    thresholds = info.answer.thresholds if isinstance(info.answer, MultiLabel) else None
    if thresholds is None:
        dataset.check_one_label("A bundle that predicts one class")
    labels = map_labels(chosen.split.labels, class_indices, classes, several=thresholds is not None)
    images = dataclasses.replace(chosen.split, labels=labels)
    names = info.labels or tuple(map(str, range(classes)))
    notes = [*dataset.notes, *chosen.notes, *note_match(info.labels, classes, dataset.labels)]
    loader = Loader(images, info.preprocess, batch=_BATCH, shuffle=False, workers=workers)
    with engine.running(None) as run:
        count = itertools.count(0, _BATCH)

        def compute_logits(pixels: Tensor) -> Tensor:
            first = next(count)
            names = f"{images.image_name(first)!r} to {images.image_name(first + len(pixels) - 1)!r}"
            with watch_step(lambda: f"computing {names} with engine {engine.name}"):
                return torch.from_numpy(run(pixels.numpy()).logits)

        meter = Meter(len(images), "images")
        predictions = collect_predictions(compute_logits, loader, classes, info.answer.probabilities, meter=meter)
    if not np.isfinite(predictions.probabilities).all():
        raise CorruptFileError(OVERFLOWS)
    about = {"protocol": "classify", "data": dataset.name, **chosen.about, "labels_matched": matching, "notes": notes}
    return SplitEvaluation(dataset, chosen, class_indices, names, predictions, about, thresholds)


def map_labels(labels: np.ndarray, class_indices: np.ndarray, classes: int, *, several: bool) -> np.ndarray:
    """Convert the data's labels to the bundle's classes.

    `class_indices` has the bundle's class for each class of the data. If the bundle predicts `several` labels, the
    result is (n, classes); data with one class per image then have a single label per image.
    """
    if not several:
        return class_indices[labels]
    table = np.zeros((len(labels), classes), np.uint8)
    if labels.ndim == 2:
        table[:, class_indices] = labels
    else:
        table[np.arange(len(labels)), class_indices[labels]] = 1
    return table


@dataclasses.dataclass(frozen=True)
class FeatureExamples:
    """Features and classes of training images and test images."""

    features: np.ndarray
    labels: np.ndarray
    test_features: np.ndarray
    test_labels: np.ndarray
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
    """Compute the features of the training images (`train`) and of the test images (`test`, otherwise `val`).

    For data without splits, the test images are those that the bundle's training held out. If the bundle was trained on
    other data, or with a `seed`, they are the images that training with this seed (default: 0) would hold out.
    """
    loaded = open_to_compute(bundle, device=device)
    store = FeatureStore(loaded, bundle, layer=layer, folder=cache, workers=workers)
    dataset = open_data(data)
    dataset.check_one_label("Evaluating features")
    training, chosen = _divide_for_bundle(loaded.provenance, dataset, split, seed)
    test = chosen.split
    features, test_features = store.of(training), store.of(test)
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
    return FeatureExamples(features, training.labels, test_features, test.labels, dataset.labels, about)


def _divide_for_bundle(
    provenance: dict[str, Any], dataset: Dataset, split: str | None, seed: int | None
) -> tuple[Split, EvaluationSplit]:
    """Return training and test images for the features of a bundle with this provenance.

    Without a seed, data without splits is divided in the same way as in the bundle's training.
    """
    training, test = choose_train_and_test(dataset, split, 0 if seed is None else seed)
    if test.name != HELD_OUT or not was_trained_on(dataset, provenance):
        return training, EvaluationSplit(test)
    divided = training_and_held_out(dataset, provenance)
    if divided is not None and seed is None:
        return divided[0], EvaluationSplit(divided[1], notes=(note_on_held_out(divided[1]),))
    trained_on = divided is None or not have_same_images(divided[1], test)
    return training, EvaluationSplit(test, trained_on, (note_on_training_images(),) if trained_on else ())


def choose_train_and_test(dataset: Dataset, split: str | None, seed: int) -> tuple[Split, Split]:
    """Return training images and test images, which never overlap. Raises UsageError if there are none."""
    seed = check_integer("seed", seed, low=0, high=2**63 - 1)
    if dataset.splits.keys() <= {"all", "train"}:
        if split not in _HELD_OUT_NAMES:
            raise UsageError(
                f"Split must be val, a held-out share, for data without splits, got {split!r} for {dataset.name!r}."
            )
        training, test = dataset.for_training(holdout=_HOLDOUT, seed=seed)
        if test is None:
            raise UsageError(f"Data must have a class of at least 2 images, got none in {dataset.name!r}.")
        return training, test
    training, _ = dataset.for_training(holdout=0, seed=seed)
    test = dataset.for_evaluation(split)
    if test.name == training.name:
        raise UsageError(f"Split must not be {test.name}: the model is trained on it. Use test or val.")
    return training, test


def knn(
    examples: FeatureExamples, *, neighbours: int | None = None, temperature: float = TEMPERATURE
) -> dict[str, Any]:
    """Return all scores of a vote of the nearest training images: 20 by default, or all if there are fewer."""
    count = len(examples.features)
    neighbours = min(NEIGHBOURS, count) if neighbours is None else neighbours
    neighbours = check_integer("neighbours", neighbours, low=1, high=count)
    shares = neighbour_votes(
        examples.features,
        examples.labels,
        examples.test_features,
        classes=examples.classes,
        neighbours=neighbours,
        temperature=temperature,
    )
    return {
        "protocol": "knn",
        **examples.about,
        "neighbours": neighbours,
        "temperature": temperature,
        **score_classes(shares, examples.test_labels, examples.names),
    }


def probe(examples: FeatureExamples, *, penalty: float | None = None, seed: int = 0) -> dict[str, Any]:
    """Return all scores of a logistic regression on the features."""
    classifier, penalty = fit_probe(
        examples.features, examples.labels, classes=examples.classes, penalty=penalty, seed=seed
    )
    probabilities = classifier.probabilities(examples.test_features)
    return {
        "protocol": "probe",
        **examples.about,
        "penalty": penalty,
        **score_classes(probabilities, examples.test_labels, examples.names),
    }


def fewshot(
    examples: FeatureExamples,
    *,
    shots: Sequence[int] | None = None,
    seeds: int = 5,
    seed: int = 0,
    penalty: float | None = None,
) -> dict[str, Any]:
    """Return the scores of the paper's few-shot protocol: least squares from a few images of each class, then from all.

    In the result, "shots" has a row for each number of images per class, with the mean accuracy over `seeds` random
    choices of images and its 95 % interval (Student's, over the choices). The other scores are those with all images.
    """
    seeds = check_integer("seeds", seeds, low=1, high=1000)
    counts = np.bincount(examples.labels, minlength=examples.classes)
    notes = list(examples.about["notes"])
    shot_counts = {
        check_integer("shots", number, low=1, high=int(counts.max())) for number in (() if shots is None else shots)
    }
    rows = []
    for number in sorted(shot_counts or set(SHOTS)):
        if number > counts.max():
            notes.append(f"{number} shots are left out: no class has more than {counts.max():,} training images")
            continue
        if smaller := [name for name, count in zip(examples.names, counts, strict=True) if count < number]:
            names = ", ".join(smaller[:5]) + (", ..." if len(smaller) > 5 else "")
            notes.append(
                f"{number} shots: {len(smaller)} of {examples.classes} classes have fewer images, all of which are used"
                f" ({names})"
            )
        row = _score_shots(examples, number, range(seed, seed + seeds), penalty)
        rows.append({"shots": number, **row, "fewer": smaller})
    classifier, penalty = fit_ridge(examples.features, examples.labels, classes=examples.classes, penalty=penalty)
    scores = classifier(examples.test_features)
    return {
        "protocol": "fewshot",
        **examples.about,
        "notes": notes,
        "seeds": seeds,
        "shots": rows,
        "penalty": penalty,
        **score_classes(scores, examples.test_labels, examples.names, calibrated=False),
    }


def _score_shots(examples: FeatureExamples, shots: int, seeds: Sequence[int], penalty: float | None) -> dict[str, Any]:
    """Return accuracies of the few-shot classifier with `shots` images per class, one for each seed, as JSON."""
    accuracies, penalties = [], []
    for seed in seeds:
        sample = sample_shots(examples.labels, shots, seed)
        classifier, chosen_penalty = fit_ridge(
            examples.features[sample], examples.labels[sample], classes=examples.classes, penalty=penalty
        )
        predicted = classifier(examples.test_features).argmax(axis=1)
        accuracies.append(float((predicted == examples.test_labels).mean()))
        penalties.append(chosen_penalty)
    interval = mean_interval(accuracies)
    return {
        "train_count": len(sample),
        "accuracy": float(np.mean(accuracies)),
        "accuracy_interval": None if interval is None else [max(interval[0], 0.0), min(interval[1], 1.0)],
        "accuracies": accuracies,
        "penalties": penalties,
    }
