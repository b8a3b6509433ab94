"""`vitrail finetune`: training that starts from a bundle.

As in the paper (arXiv 2010.11929, section 3.2), the pre-training head is replaced by a head of zeros, and position
embeddings are interpolated for a higher resolution. With the recipe `auto`, the new head is fitted to the features of
the frozen model by least squares, and training continues from it (arXiv 2202.10054); the model with the better score on
held-out images is kept. All changes to the bundle are printed.
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

# Model settings on which no weight depends, so that a recipe may change them in a pre-trained model.
_CHANGEABLE = ("dropout", "drop_path", "token_drop", "merge")
# Assumed residual when the bundle's own head is kept, because no head is fitted to measure it.
_KEPT_HEAD_RESIDUAL = 0.1
_MIN_RESIDUAL = 0.01  # lower bound, so that a head without errors still gives a learning rate above 0


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
    """Fine-tune a copy of a bundle on DATA and return the result; files are written to `output`.

    Notes and progress are printed to stderr unless `quiet` is set.
    """
    if not OBJECTIVES[recipe.objective].classifies:
        raise UsageError(
            f"Fine-tuning must have an objective that learns classes (classify, multilabel), got {recipe.objective}."
        )
    if recipe.head_bias:
        raise UsageError(
            f"Head bias must be 0 in fine-tuning, which initialises the head differently, got {recipe.head_bias:g}."
        )
    loaded = open_bundle(bundle)
    check_head(loaded.model)

    def initialise(context: RunContext) -> StartingPoint:
        """Return the bundle's model with a new head, fitted to its frozen features if the recipe says so."""
        channels = count_channels(context.dataset.first_split)
        model, preprocess, notes = adapt_bundle(loaded, context.dataset.labels, channels, recipe, resolution)
        probe, damaged = None, {}
        if recipe.head == "probe" and context.is_new and _can_fit_head(model):
            probe = fit_head(model, preprocess, context, recipe, damaged, workers=options.workers)
            notes += (
                f"the head fitted to the frozen features by least squares in {probe['seconds']:.1f} s"
                f" {_describe_probe(probe)}",
            )

        rate_scale = 1.0
        if recipe.rate_by_residual and context.is_new:
            rate_scale, reason = _scale_rate(model, probe)
            rate = f"{recipe.learning_rate * rate_scale:.2g} = {recipe.learning_rate:g} x {rate_scale:.3g}"
            notes += (f"peak learning rate {rate} ({reason}; set another with --lr)",)

        def make_body() -> AnyModel:
            return adapt_bundle(loaded, context.dataset.labels, channels, recipe, resolution)[0]

        key = bundle_key(bundle)
        origin = describe_origin(bundle, loaded, notes)
        return StartingPoint(model, preprocess, key[:12], origin, notes, probe, damaged, make_body, rate_scale)

    return run(data, output, recipe, options, initialise, **controls)


HeadReplacement = Callable[[AnyModel], tuple[AnyModel, str]]
"""Function that returns a copy of a model with the head that the run needs, and a note about the change."""


def describe_origin(bundle: Bundle | str | Path, loaded: Bundle, notes: Iterable[str]) -> dict[str, Any]:
    """Return the provenance entry about the bundle that a run starts from, with the changes to it."""
    name = "in memory" if isinstance(bundle, Bundle) else escape_surrogates(str(bundle))
    keys = ("data", "licence", "objective", "converted_from")
    inherited = {key: loaded.provenance[key] for key in keys if key in loaded.provenance}
    return {"finetuned_from": {"bundle": name, "manifest": bundle_key(bundle), "changes": list(notes), **inherited}}


def adapt_bundle(
    bundle: Bundle, labels: tuple[str, ...], channels: int, recipe: Recipe, resolution: Pair | None = None
) -> tuple[AnyModel, Preprocess, tuple[str, ...]]:
    """Adapt a bundle to classes, channels and resolution.

    Return a copy of its model, its preprocessing, and notes about the changes.
    """
    return adapt_bundle_with(bundle, lambda model: replace_head(model, bundle, labels), channels, recipe, resolution)


def adapt_bundle_with(
    bundle: Bundle, head_replacement: HeadReplacement, channels: int, recipe: Recipe, resolution: Pair | None
) -> tuple[AnyModel, Preprocess, tuple[str, ...]]:
    """Adapt a bundle like `adapt_bundle`, with any function that replaces the head.

    The argument `resolution` takes precedence over that of the recipe, and the recipe over the bundle.
    """
    model, preprocess, notes = bundle.model, bundle.preprocess, []
    settings = dict(recipe.model)
    recipe_resolution = settings.pop("resolution", None)
    resolution = recipe_resolution if resolution is None else resolution
    if unsupported := sorted(settings.keys() - set(_CHANGEABLE)):
        raise UsageError(
            f"Model settings in fine-tuning must be among resolution, {', '.join(_CHANGEABLE)}, got"
            f" model.{unsupported[0]}."
        )
    if resolution is not None:
        model, note = _resize_model(model, resolution)
        notes += [note] if note else []
    if channels != model.config.channels:
        model, mean, std, note = adapt_channels(model, channels, preprocess.mean, preprocess.std)
        preprocess = preprocess.replace(mean=mean, std=std)
        notes.append(note)
    model, note = head_replacement(model)
    notes.append(note)
    if settings:
        model = model.clone_with(**settings)
    changes = {**recipe.preprocess, "resolution": model.config.resolution}
    return model, Preprocess.from_json({**preprocess.to_json(), **changes}), tuple(notes)


def _resize_model(model: AnyModel, resolution: int | Pair) -> tuple[AnyModel, str | None]:
    """Return a copy of the model for another resolution, and a note; None if the resolution stays the same."""
    old_resolution = model.config.resolution
    model = model.resize(resolution)
    if model.config.resolution == old_resolution:
        return model, None
    resize_note = surgery_of(model).resize_note
    rule = f", {resize_note}" if resize_note else ""
    return model, f"{_format_resolution(old_resolution)} px became {_format_resolution(model.config.resolution)}{rule}"


def replace_head(model: AnyModel, bundle: Bundle, labels: tuple[str, ...]) -> tuple[AnyModel, str]:
    """Return a copy of the model with a head for the classes `labels`, and a note about it.

    If these are the classes of the bundle, its head is kept and permuted to their order. Otherwise the copy has a new
    head of zeros and no hidden layer before it.
    """
    if (order := _match_classes(bundle, labels)) is not None:
        adapted = model.clone_with()
        with torch.no_grad():
            for new, old in zip(adapted.output_layers(), model.output_layers(), strict=True):
                new.weight.copy_(old.weight[order])
                if new.bias is not None:
                    new.bias.copy_(old.bias[order])
        return adapted, f"the {len(labels):,} classes are those of the bundle: its head is kept"
    adapted, notes = surgery_of(model).with_new_head(len(labels))
    return adapted, "; ".join([f"a new head for {len(labels):,} classes", *notes])


def _has_trained_head(model: AnyModel) -> bool:
    return any(bool(layer.weight.any()) for layer in model.output_layers())


def _can_fit_head(model: AnyModel) -> bool:
    """Whether the head is linear and still zero, so that least squares can find its weights."""
    return not model.config.head_layers and not _has_trained_head(model)


def _match_classes(bundle: Bundle, labels: tuple[str, ...]) -> list[int] | None:
    """Return the bundle's index of each class, or None if these are not its classes or its head was not trained.

    Classes are matched by name, or by index if the bundle has no names. Classes named 0 to 9 do not match a bundle with
    ten other names.
    """
    classes = bundle.model.config.classes
    if not bundle.info.classifies or len(labels) != classes:
        return None
    if bundle.labels is not None and set(bundle.labels) != set(labels):
        return None
    try:
        indices, _ = match_labels(bundle.labels, classes, labels)
    except UsageError:
        return None
    order = indices.tolist()
    return order if len(set(order)) == classes and _has_trained_head(bundle.model) else None


def extract_training_features(
    model: AnyModel,
    preprocess: Preprocess,
    context: RunContext,
    recipe: Recipe,
    damaged: dict[str, str],
    *,
    workers: int,
    mirrored: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and labels of all readable training images, or of their mirror images.

    Each rank computes a share of the features and receives all of them. Unreadable images are added to `damaged`. The
    model is moved to the device of the rank.
    """
    ranks, training = context.ranks, context.training
    model.to(ranks.device).eval()
    shares = [np.arange(len(training))[rank :: ranks.count] for rank in range(ranks.count)]
    on_damage = "error" if recipe.on_damage == "error" else "skip"
    share, part = training.select(shares[ranks.rank]), None
    if len(share):
        part = extract_features(
            model, preprocess, share, mirrored=mirrored, workers=workers, on_damage=on_damage, damaged=damaged
        )
    features = np.concatenate([part for part in ranks.gather(part) if part is not None])
    labels = training.labels[np.concatenate(shares)]
    is_readable = np.isfinite(features).all(axis=1)
    return features[is_readable], labels[is_readable]


def fit_head(
    model: AnyModel,
    preprocess: Preprocess,
    context: RunContext,
    recipe: Recipe,
    damaged: dict[str, str],
    *,
    workers: int,
) -> dict[str, Any]:
    """Fit the head of the model in place, by least squares on its features of the training images.

    Return the leave-one-out accuracy (or mAP), the residual and the duration. The first rank solves; unreadable images
    are added to `damaged`.
    """
    start = time.monotonic()
    context.tell(f"computing features of {len(context.training):,} images for the head")
    features, labels = extract_training_features(model, preprocess, context, recipe, damaged, workers=workers)

    def solve() -> tuple[Linear, dict[str, Any]]:
        linear, left_out = fit_ridge_head(features, labels, classes=model.config.classes)
        count = len(features)
        if labels.ndim == 2:
            mean_precision = score_labels(left_out, labels, context.dataset.labels)["map"]
            return linear, {"map": mean_precision, "count": count, "residual": 1 - mean_precision}
        correct = int((left_out.argmax(axis=1) == labels).sum())
        residual = 1 - float(torch.from_numpy(left_out).softmax(dim=1)[np.arange(count), labels].mean())
        scores = {"accuracy": correct / count, "interval": wilson_interval(correct, count)}
        return linear, {**scores, "count": count, "residual": residual}

    linear, scores = context.ranks.run_on_first(solve)
    with torch.no_grad():
        for layer in model.output_layers():  # two heads read two tokens, and the features are their mean
            layer.weight.copy_(torch.from_numpy(linear.weight.T))
            layer.bias.copy_(torch.from_numpy(linear.bias))
    return {**scores, "seconds": round(time.monotonic() - start, 2)}


def _describe_probe(probe: dict[str, Any]) -> str:
    """Describe the leave-one-out score of a head fitted by least squares."""
    images = f"{probe['count']:,} training images, each left out in turn"
    if "map" in probe:
        return f"has mAP {probe['map']:.1%} on {images}"
    low, high = probe["interval"]
    return f"classifies {probe['accuracy']:.1%} of {images}, correctly (95 % interval {low:.1%} to {high:.1%})"


def _scale_rate(model: AnyModel, probe: dict[str, Any] | None) -> tuple[float, str]:
    """Return the factor of the learning rate in fine-tuning, and the reason for its value."""
    if probe is None:
        if _has_trained_head(model):
            return _KEPT_HEAD_RESIDUAL, "default for the head of the bundle"
        return 1 - 1 / max(model.config.classes, 2), "a head that starts at zero"
    if probe["residual"] < _MIN_RESIDUAL:
        return _MIN_RESIDUAL, "the minimum: the head makes almost no mistakes"
    if "map" in probe:
        return probe["residual"], "1 - mAP of the head: a better head gives smaller steps"
    return probe["residual"], "mean probability that the head gives to wrong labels: a better head gives smaller steps"


def _format_resolution(pair: Pair) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]} x {pair[1]}"
