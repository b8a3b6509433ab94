"""`vitrail finetune`: training that starts from a bundle.

As in the paper (arXiv 2010.11929, section 3.2), the pre-training head is replaced by a zero one, and position
embeddings are interpolated for a higher resolution. With the recipe `auto`, the new head is the least-squares solution
on the frozen model's features, from which training continues (arXiv 2202.10054); the better of both models on held-out
images is kept. All changes to the bundle are printed.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch

from vitrail.bundles.bundle import Bundle, bundle_key, check_head, open_bundle
from vitrail.core.errors import UsageError
from vitrail.core.files import escape_surrogates
from vitrail.core.intervals import wilson_interval
from vitrail.core.least_squares import Linear
from vitrail.core.settings import Pair
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import AnyData
from vitrail.evaluation.feature_classifiers import fit_ridge_head
from vitrail.evaluation.features import extract_features
from vitrail.evaluation.labels import match_labels
from vitrail.evaluation.metrics import score_labels
from vitrail.models.base import AnyModel
from vitrail.models.surgery import surgery_of
from vitrail.training.adapt_channels import adapt_channels
from vitrail.training.options import Options
from vitrail.training.recipe import OBJECTIVES, Recipe
from vitrail.training.run import Result, RunControls, run
from vitrail.training.starting_point import RunContext, StartingPoint, count_channels

# Settings that no weight depends on: a recipe may change them in a model that exists.
_CHANGEABLE = ("dropout", "drop_path", "token_drop", "merge")
# Assumed residual when the bundle's own head is kept, because no head is fitted to measure it.
_KEPT_HEAD_RESIDUAL = 0.1
_LEAST_RESIDUAL = 0.01  # a head without any error still leaves something to learn


def finetune(
    bundle: Bundle | str | Path,
    data: AnyData,
    output: str | Path,
    recipe: Recipe,
    options: Options,
    *,
    resolution: Pair | None = None,
    **controls: Unpack[RunControls],
) -> Result:
    """Fine-tune a bundle, which stays as it is, on DATA. Only notes and progress are printed, unless `quiet`."""
    if not OBJECTIVES[recipe.objective].classifies:
        raise UsageError(
            f"Fine-tuning must have an objective that learns classes (classify, multilabel), got {recipe.objective}."
        )
    if recipe.head_bias:
        raise UsageError("Fine-tuning must keep the recipe's head_bias 0: its head begins otherwise.")
    loaded = open_bundle(bundle)
    check_head(loaded.model)

    def initialise(given: RunContext) -> StartingPoint:
        channels = count_channels(given.dataset.first_split)
        model, preprocess, notes = adapt_bundle(loaded, given.dataset.labels, channels, recipe, resolution)
        probe, damaged = None, {}
        if recipe.head == "probe" and given.is_new and not model.head.weight.any():
            probe = fit_head(model, preprocess, given, recipe, damaged, workers=options.workers)
            notes += (
                f"least squares on the frozen model's features, in {probe['seconds']:.1f} s, {_spoken_probe(probe)}",
            )

        rate_scale = 1.0
        if recipe.rate_by_residual and given.is_new:
            rate_scale, reason = _scale_rate(model, probe)
            rate = f"{recipe.learning_rate * rate_scale:.2g} = {recipe.learning_rate:g} x {rate_scale:.3g}"
            notes += (f"peak learning rate {rate} ({reason}; --lr sets another)",)

        def body() -> AnyModel:
            return adapt_bundle(loaded, given.dataset.labels, channels, recipe, resolution)[0]

        key = bundle_key(bundle)
        origin = describe_origin(bundle, loaded, notes)
        return StartingPoint(model, preprocess, key[:12], origin, notes, probe, damaged, body, rate_scale)

    return run(data, output, recipe, options, initialise, **controls)


HeadReplacement = Callable[[AnyModel], tuple[AnyModel, str]]
"""Makes a copy of a model with the head that the run needs, and a note about it."""


def describe_origin(bundle: Bundle | str | Path, loaded: Bundle, notes: Iterable[str]) -> dict[str, Any]:
    """What the provenance says of the bundle that a run begins with, and of the changes to it."""
    name = "in memory" if isinstance(bundle, Bundle) else escape_surrogates(str(bundle))
    kept = ("data", "licence", "objective", "converted_from")
    known = {name: loaded.provenance[name] for name in kept if name in loaded.provenance}
    return {"finetuned_from": {"bundle": name, "manifest": bundle_key(bundle), "changes": list(notes), **known}}


def adapt_bundle(
    bundle: Bundle, labels: tuple[str, ...], channels: int, recipe: Recipe, resolution: Pair | None = None
) -> tuple[AnyModel, Preprocess, tuple[str, ...]]:
    """The bundle's model for these classes, channels and resolution, its preprocessing, and notes about the changes."""
    return adapt_bundle_with(bundle, lambda model: replace_head(model, bundle, labels), channels, recipe, resolution)


def adapt_bundle_with(
    bundle: Bundle, new_head: HeadReplacement, channels: int, recipe: Recipe, resolution: Pair | None
) -> tuple[AnyModel, Preprocess, tuple[str, ...]]:
    """`adapt_bundle` with any new head.

    The resolution is the given one, otherwise the recipe's, otherwise the bundle's.
    """
    model, preprocess, notes = bundle.model, bundle.preprocess, []
    settings = dict(recipe.model)
    wanted = settings.pop("resolution", None)
    wanted = wanted if resolution is None else resolution
    if strange := sorted(settings.keys() - set(_CHANGEABLE)):
        raise UsageError(
            f"Fine-tuning must keep the model but for resolution, {', '.join(_CHANGEABLE)}, got model.{strange[0]}."
        )
    if wanted is not None:
        model, note = _resize(model, wanted)
        notes += [note] if note else []
    if channels != model.config.channels:
        model, mean, std, note = adapt_channels(model, channels, preprocess.mean, preprocess.std)
        preprocess = preprocess.replace(mean=mean, std=std)
        notes.append(note)
    model, note = new_head(model)
    notes.append(note)
    if settings:
        model = model.clone_with(**settings)
    changes = {**recipe.preprocess, "resolution": model.config.resolution}
    return model, Preprocess.from_json({**preprocess.to_json(), **changes}), tuple(notes)


def _resize(model: AnyModel, wanted: int | Pair) -> tuple[AnyModel, str | None]:
    before = model.config.resolution
    model = model.resize(wanted)
    if model.config.resolution == before:
        return model, None
    resize_note = surgery_of(model).resize_note
    rule = f", {resize_note}" if resize_note else ""
    return model, f"{_spoken(before)} px became {_spoken(model.config.resolution)}{rule}"


def replace_head(model: AnyModel, bundle: Bundle, now: tuple[str, ...]) -> tuple[AnyModel, str]:
    """If the classes are the bundle's, keep the head, in DATA's order. Otherwise a zero head without hidden layer."""
    if (order := _same_classes(bundle, now)) is not None:
        kept = model.clone_with()
        with torch.no_grad():
            kept.head.weight.copy_(model.head.weight[order])
            kept.head.bias.copy_(model.head.bias[order])
        return kept, f"the {len(now):,} classes are the bundle's own: its head stays"
    fresh, notes = surgery_of(model).with_new_head(len(now))
    return fresh, "; ".join([f"a new head for {len(now):,} classes", *notes])


def _same_classes(bundle: Bundle, now: tuple[str, ...]) -> list[int] | None:
    """The bundle's index of each class, if the classes are those of the bundle: by name, or by index if it has no
    names. (Ten classes named 0 to 9 are not those of a bundle with ten other names.)"""
    classes = bundle.model.config.classes
    if not bundle.info.classifies or len(now) != classes:
        return None
    if bundle.labels is not None and set(bundle.labels) != set(now):
        return None
    try:
        place, _ = match_labels(bundle.labels, classes, now)
    except UsageError:
        return None
    return place.tolist() if len(set(place.tolist())) == classes and bool(bundle.model.head.weight.any()) else None


def extract_training_features(
    model: AnyModel,
    preprocess: Preprocess,
    given: RunContext,
    recipe: Recipe,
    damaged: dict[str, str],
    *,
    workers: int,
    mirrored: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The frozen model's features of all training images that can be read, or of their mirror images, and their labels.
    Each rank computes its part and gets all. The others are added to `damaged`."""
    ranks, training = given.ranks, given.training
    model.to(ranks.device).eval()
    shares = [np.arange(len(training))[rank :: ranks.count] for rank in range(ranks.count)]
    on_damage = "error" if recipe.on_damage == "error" else "skip"
    mine, part = training.select(shares[ranks.rank]), None
    if len(mine):
        part = extract_features(
            model, preprocess, mine, mirrored=mirrored, workers=workers, on_damage=on_damage, damaged=damaged
        )
    features = np.concatenate([part for part in ranks.gather(part) if part is not None])
    labels = training.labels[np.concatenate(shares)]
    known = np.isfinite(features).all(axis=1)
    return features[known], labels[known]


def fit_head(
    model: AnyModel,
    preprocess: Preprocess,
    given: RunContext,
    recipe: Recipe,
    damaged: dict[str, str],
    *,
    workers: int,
) -> dict[str, Any]:
    """Fit the model's head by least squares on its features; returns its leave-one-out accuracy, or mAP. The first rank
    solves; unreadable images are added to `damaged`."""
    began = time.monotonic()
    given.tell(f"computing features of {len(given.training):,} images for the head")
    features, labels = extract_training_features(model, preprocess, given, recipe, damaged, workers=workers)

    def solve() -> tuple[Linear, dict[str, Any]]:
        linear, left_out = fit_ridge_head(features, labels, classes=model.config.classes)
        count = len(features)
        if labels.ndim == 2:
            mean_precision = score_labels(left_out, labels, given.dataset.labels)["map"]
            return linear, {"map": mean_precision, "count": count, "residual": 1 - mean_precision}
        right = int((left_out.argmax(axis=1) == labels).sum())
        residual = 1 - float(torch.from_numpy(left_out).softmax(dim=1)[np.arange(count), labels].mean())
        scores = {"accuracy": right / count, "interval": wilson_interval(right, count)}
        return linear, {**scores, "count": count, "residual": residual}

    linear, found = given.ranks.run_on_first(solve)
    with torch.no_grad():
        model.head.weight.copy_(torch.from_numpy(linear.weight.T))
        model.head.bias.copy_(torch.from_numpy(linear.bias))
    return {**found, "seconds": round(time.monotonic() - began, 2)}


def _spoken_probe(probe: dict[str, Any]) -> str:
    on = f"{probe['count']:,} training images, each left out in turn"
    if "map" in probe:
        return f"has mAP {probe['map']:.1%} on {on}"
    low, high = probe["interval"]
    return f"is right on {probe['accuracy']:.1%} of {on} (95 % interval {low:.1%} to {high:.1%})"


def _scale_rate(model: AnyModel, probe: dict[str, Any] | None) -> tuple[float, str]:
    """The factor of the learning rate, and where it comes from."""
    if probe is None:
        if model.head.weight.any():
            return _KEPT_HEAD_RESIDUAL, "usual for the bundle's own head"
        return 1 - 1 / max(model.config.classes, 2), "a head that starts at zero"
    if probe["residual"] < _LEAST_RESIDUAL:
        return _LEAST_RESIDUAL, "the smallest factor: the head makes hardly any mistake"
    if "map" in probe:
        return probe["residual"], "1 - mAP of the head: the better it is, the smaller the steps"
    return probe["residual"], "mean probability the head gives to wrong labels: the better it is, the smaller the steps"


def _spoken(pair: Pair) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} x {pair[1]}"
