"""The bias profile of bundles, without training: locality, robustness to shifts, sensitivity to the order of patches.

Every measurement has an interval and an exact or untrained reference. Bundles are compared on the same images.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.bundle import Bundle, load
from vitrail.bundles.metadata import OVERFLOWS
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.intervals import wilson_interval
from vitrail.core.settings import Pair
from vitrail.core.terminal import Say
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.labels import match_labels
from vitrail.evaluation.metrics import calibration_bins
from vitrail.evaluation.paired import holm_levels
from vitrail.lab import internals, perturbations
from vitrail.lab.plan import parse_budget
from vitrail.lab.statistics import Estimate
from vitrail.models.config import ModelConfig
from vitrail.models.create import build

MAX_IMAGES, MIN_IMAGES = 2000, 32
"""Largest and smallest number of images."""
_MAX_BYTES = 10**9  # of preprocessed images in memory
_MAX_LAYERS = 6  # layers whose receptive areas are measured
_GRADIENT_IMAGES, _ATTENTION_IMAGES, _SIMILARITY_IMAGES = 16, 64, 128  # largest numbers of images for each measure
_TIMED_BATCHES = 5


class Measurement(NamedTuple):
    """One measured quantity of a bundle."""

    estimate: Estimate
    values: np.ndarray | None = None
    """Value of each image, to compare bundles. For the similarity of layers, values without one batch each."""
    reference: float | None = None
    """Value of an untrained model, or an exact value."""
    reference_kind: str = ""
    """Kind of reference, such as `untrained` or `exact`. The page shows its message `is-KIND`."""
    clipped: tuple[float, float] | None = None
    """Interval of a share, clipped to 0 and 1. It replaces the interval of the estimate."""

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        return self.clipped or self.estimate.interval()


@dataclasses.dataclass
class Profile:
    """All measurements of a bundle."""

    name: str
    bundle: Bundle
    numbers: dict[str, Measurement]
    """Measurements by name, in the order of the page."""
    accuracies: dict[str, Measurement]
    """Accuracy by perturbation. The empty name means none; `shift 3.5` is a shift by 3.5 % of the side."""
    distances: dict[str, list[tuple[float, float]]]
    """Attention distance of each head, `trained` and `untrained`: (per cent of the depth, share of uniform)."""
    areas: dict[str, list[tuple[float, float]]]
    """Receptive area of each layer, `trained` and `untrained`: (per cent of the depth, share of the image)."""
    similarity: np.ndarray | None
    """CKA between all layers."""
    bins: list[tuple[int, float, float]]
    """Calibration bins: number of predictions, mean confidence, accuracy."""
    cost: dict[str, float]
    """Parameters, multiply-accumulates, and milliseconds per image."""


class BundleContrast(NamedTuple):
    """Difference of two bundles in one measure on the same images."""

    first: str
    second: str
    measure: str
    difference: Estimate
    level: float
    """Level by Holm's correction over all comparisons of the page."""

    @property
    def is_significant(self) -> bool:
        """Whether the interval of the difference excludes zero."""
        low, high = self.difference.interval(self.level)
        return low > 0 or high < 0


def profile(
    data: str | Path | Dataset, bundles: Sequence[str | Path], *, budget: str | None = None, tell: Say
) -> tuple[list[Profile], list[BundleContrast], Split]:
    """Measure bundles on the test images of a data set, or on all images without a test split.

    Return the profiles, the pairwise comparisons, and the images.
    """
    seconds = None if budget is None else parse_budget(budget)
    opened = {name: load(path) for name, path in _name_bundles(bundles).items()}
    dataset = open_data(data)
    dataset.check_one_label("A profile")
    class_indices = {}
    for name, bundle in opened.items():
        bundle.info.check_single_label("A profile")
        class_indices[name], matching = match_labels(bundle.labels, bundle.model.config.classes, dataset.labels)
        if matching == "as class numbers" and bundle.labels is not None:
            tell(f"note: classes of {name} are matched by number, because their names differ")
    split = dataset.for_evaluation().sample_evenly(min(MAX_IMAGES, _image_count(list(opened.values()), seconds)))
    if len(split) < MIN_IMAGES:
        raise UsageError(
            f"Images to profile bundles on must be {MIN_IMAGES} or more, got {len(split)} in {dataset.name!r}."
        )
    plan = plan_perturbations(list(opened.values()))
    profiles = []
    for number, (name, bundle) in enumerate(opened.items(), 1):
        tell(f"{number}/{len(opened)}  {name} on {len(split):,} images")
        profiles.append(_measure_bundle(name, bundle, split, class_indices[name][split.labels], plan))
    return profiles, compare_pairs(profiles), split


def _name_bundles(bundles: Sequence[str | Path]) -> dict[str, str | Path]:
    """Name bundles by the last part of their path, or by the whole path if that is ambiguous."""
    last_parts = [Path(path).name or str(path) for path in bundles]
    names = {
        short if last_parts.count(short) == 1 else str(path): path
        for short, path in zip(last_parts, bundles, strict=True)
    }
    if len(names) < len(bundles):
        raise UsageError(f"Bundles must differ, got {', '.join(map(str, bundles))}.")
    return names


class PerturbationPlan(NamedTuple):
    """Perturbations that apply to all bundles alike, independent of their resolution."""

    shift_distances: tuple[float, ...]
    """Shift distances as shares of the side."""
    grids: list[Pair]
    """Grids of shuffled blocks."""
    reported_grid: Pair
    """Grid of the reported measure: the finest that cuts no patch of any bundle, if there is one."""
    keeps_all_patches: bool
    """Whether the reported grid cuts no patch of any bundle."""
    drop_grid: Pair
    """Grid of dropped patches: that of the first bundle with patches."""

    def keeps_patches(self, config: ModelConfig) -> bool:
        """Return whether the reported grid cuts no patch of a model; for a model without patches, of any bundle."""
        if not config.patch or config.grid is None:
            return self.keeps_all_patches
        return all(side % blocks == 0 for side, blocks in zip(config.grid, self.reported_grid, strict=True))

    def distances(self, side: int) -> dict[int, float]:
        """Return shifts in pixels with their share of the side."""
        return {max(round(share * side), 1): share for share in self.shift_distances}


def plan_perturbations(bundles: Sequence[Bundle]) -> PerturbationPlan:
    """Choose shifts and grids that fit the resolutions and patches of all bundles."""
    configs = [bundle.model.config for bundle in bundles]
    sides = [min(config.resolution) for config in configs]
    grids = perturbations.shuffle_grids(*(config.resolution for config in configs))
    if not grids:
        sizes = ", ".join(f"{height} x {width}" for height, width in (config.resolution for config in configs))
        raise UsageError(f"Bundles to profile must have resolutions with a common divisor, got {sizes} px.")
    patched = [config.grid for config in configs if config.patch and config.grid]
    whole_patch_grids = [
        blocks for blocks in grids if all(grid[0] % blocks[0] == 0 and grid[1] % blocks[1] == 0 for grid in patched)
    ]
    drop_grid = patched[0] if patched and max(patched[0]) <= min(sides) else (min(14, *sides), min(14, *sides))
    return PerturbationPlan(
        tuple(far / min(sides) for far in perturbations.shift_distances(min(sides))),
        grids,
        whole_patch_grids[-1] if whole_patch_grids and patched else grids[min(1, len(grids) - 1)],
        bool(whole_patch_grids),
        drop_grid,
    )


def _image_count(bundles: Sequence[Bundle], seconds: float | None) -> int:
    """Return the number of images that fit memory and budget."""
    configs = [bundle.model.config for bundle in bundles]
    memory_limit = min(
        _MAX_BYTES // (4 * config.channels * config.resolution[0] * config.resolution[1]) for config in configs
    )
    if seconds is None:
        return memory_limit
    shifts, shuffles = len(perturbations.shift_perturbations(perturbations.shift_distances(28))), 5
    passes = shifts + shuffles + len(perturbations.DROP_SHARES) + 2 * len(perturbations.BANDS) + 1
    cost = sum(passes * _seconds_per_image(bundle) for bundle in bundles)
    if seconds < MIN_IMAGES * cost:
        raise UsageError(f"Budget must be at least {MIN_IMAGES * cost / 60 + 0.5:.0f}m for these bundles.")
    return min(memory_limit, int(seconds / cost))


def _seconds_per_image(bundle: Bundle) -> float:
    """Measure the seconds of a forward pass per image, in batches."""
    config = bundle.model.config
    images = torch.zeros(perturbations.batch_for(config), config.channels, *config.resolution)
    times = []
    with torch.inference_mode():
        for _ in range(_TIMED_BATCHES):
            started = time.perf_counter()
            bundle.model(images)
            times.append((time.perf_counter() - started) / len(images))
    return float(np.median(times[1:]))


def _measure_bundle(name: str, bundle: Bundle, split: Split, labels: np.ndarray, plan: PerturbationPlan) -> Profile:
    """Measure one bundle. `labels` (n) are the classes of the images of `split` in the bundle's order."""
    model, config = bundle.model, bundle.model.config
    images = bundle.preprocess(list(split.images))
    torch.manual_seed(0)
    untrained = build(config).eval()
    probabilities = perturbations.predict_probabilities(model, images)
    if not np.isfinite(probabilities).all():
        raise CorruptFileError(OVERFLOWS)
    plain = probabilities.argmax(axis=1)
    right = plain == labels
    distances = plan.distances(min(config.resolution))
    predict = functools.partial(perturbations.predict_perturbed, model, images, labels, plain=plain)
    shifted = dict(predict(perturbations.shift_perturbations(distances)))
    perturbed = dict(predict(perturbations.other_perturbations(plan.grids, plan.drop_grid)))

    chance = 1 / config.classes
    agreement_by_chance = float(np.square(np.bincount(plain, minlength=config.classes) / len(plain)).sum())
    numbers = {"accuracy": _share_measurement(right, chance, "chance")}
    consistency = np.mean([predictions.same for predictions in shifted.values()], axis=0)
    numbers["shift"] = _consistency_measurement(consistency, right, 1.0, "exact-shift")
    reference = (1.0, "exact-order") if plan.keeps_patches(config) else (agreement_by_chance, "luck")
    numbers["shuffle"] = _consistency_measurement(perturbed[f"shuffle {plan.reported_grid[0]}"].same, right, *reference)
    for kind, perturbation in (("drop", "drop 0.5"), ("low", "low 0.25"), ("high", "high 0.25")):
        numbers[kind] = _consistency_measurement(perturbed[perturbation].same, right, agreement_by_chance, "luck")

    accuracies = {"": numbers["accuracy"]}
    accuracies |= {name: _share_measurement(predictions.right) for name, predictions in perturbed.items()}
    for far, share in distances.items():
        accuracies[f"shift {100 * share:.3g}"] = _mean_measurement(
            perturbations.shift_values(shifted, right, far)["accuracy"]
        )

    heads, areas = _measure_internals(bundle, untrained, images, numbers)
    similarity_images = images[:: max(len(images) // _SIMILARITY_IMAGES, 1)][:_SIMILARITY_IMAGES]
    similarity, untrained_similarity = (
        internals.layer_similarity(measured_model, similarity_images) for measured_model in (model, untrained)
    )
    if similarity is not None and untrained_similarity is not None:
        numbers["similarity"] = Measurement(
            similarity.estimate(), similarity.leave_one_out, untrained_similarity.estimate().value, "untrained"
        )
    calibration = perturbations.measure_calibration(probabilities, right)
    numbers["calibration"] = Measurement(calibration.error, None, calibration.expected_error, "calibrated")
    numbers["over"] = _mean_measurement(calibration.overconfidence, 0.0, "exact")
    return Profile(
        name,
        bundle,
        numbers,
        accuracies,
        heads,
        areas,
        None if similarity is None else similarity.table,
        calibration_bins(probabilities.max(axis=1), right),
        {"parameters": config.parameters, "macs": config.macs, "milliseconds": 1000 * _seconds_per_image(bundle)},
    )


def _measure_internals(
    bundle: Bundle, untrained: Any, images: Tensor, numbers: dict[str, Measurement]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[tuple[float, float]]]]:
    """Return attention distances and receptive areas of the trained and the untrained model.

    Their summaries are added to `numbers`.
    """
    models, depth = {"trained": bundle.model, "untrained": untrained}, bundle.model.config.depth
    attention_images = images[:: max(len(images) // _ATTENTION_IMAGES, 1)][:_ATTENTION_IMAGES]
    heads = {state: internals.head_distances(model, attention_images) for state, model in models.items()}
    if heads["trained"]:
        first, last = (heads["trained"][layer] for layer in (0, depth - 1))
        untrained_first, untrained_last = (heads["untrained"][layer] for layer in (0, depth - 1))
        nearest = first[:, first.mean(axis=0).argmin()]
        numbers["nearest"] = _mean_measurement(nearest, float(untrained_first.mean(axis=0).min()), "untrained")
        numbers["first"] = _mean_measurement(first.mean(axis=1), float(untrained_first.mean()), "untrained")
        numbers["last"] = _mean_measurement(last.mean(axis=1), float(untrained_last.mean()), "untrained")
    third = internals.third_layer(depth)
    layers = sorted({third, *np.linspace(0, depth - 1, min(_MAX_LAYERS, depth)).round().astype(int).tolist()})
    gradient_images = images[:: max(len(images) // _GRADIENT_IMAGES, 1)][:_GRADIENT_IMAGES]
    areas = {state: internals.receptive_areas(model, gradient_images, layers) for state, model in models.items()}
    numbers["area"] = _mean_measurement(areas["trained"][third], float(areas["untrained"][third].mean()), "untrained")
    return (
        {
            state: [
                (100 * (layer + 1) / depth, float(value))
                for layer, values in by_layer.items()
                for value in values.mean(axis=0)
            ]
            for state, by_layer in heads.items()
        },
        {
            state: [(100 * (layer + 1) / depth, float(values.mean())) for layer, values in by_layer.items()]
            for state, by_layer in areas.items()
        },
    )


def _mean_measurement(values: np.ndarray, reference: float | None = None, kind: str = "") -> Measurement:
    return Measurement(perturbations.mean_of(values), values, reference, kind)


def _share_measurement(right: np.ndarray, reference: float | None = None, kind: str = "") -> Measurement:
    """Return the share of correct images with Wilson's interval."""
    return _mean_measurement(right.astype(float), reference, kind)._replace(
        clipped=wilson_interval(int(right.sum()), len(right))
    )


def _consistency_measurement(same: np.ndarray, right: np.ndarray, reference: float, kind: str) -> Measurement:
    """Return the share of correct predictions that stay the same, with Wilson's interval if all or none do."""
    number = _mean_measurement(perturbations.linearised_ratio(same * right, right.astype(float)), reference, kind)
    low, high = number.estimate.interval()
    if number.estimate.error == 0 and right.any():
        low, high = wilson_interval(round(number.estimate.value * right.sum()), int(right.sum()))
    return number._replace(clipped=(max(low, 0.0), min(high, 1.0)))


def compare_pairs(profiles: Sequence[Profile]) -> list[BundleContrast]:
    """Compare all pairs of bundles in every measure that both have, on the same images."""
    contrasts = []
    for first, second in combinations(profiles, 2):
        for measure, number in first.numbers.items():
            second_number = second.numbers.get(measure)
            if second_number is None or number.values is None or second_number.values is None:
                continue
            difference = number.values - second_number.values
            if measure == "similarity":
                estimate = internals.jackknife(number.estimate.value - second_number.estimate.value, difference)
            else:
                estimate = perturbations.mean_of(difference)
            contrasts.append(BundleContrast(first.name, second.name, measure, estimate, 0.05))
    levels = holm_levels({str(index): contrast.difference.p_value for index, contrast in enumerate(contrasts)})
    return [contrast._replace(level=levels[str(index)]) for index, contrast in enumerate(contrasts)]


def profile_document(
    profiles: Sequence[Profile], pairs: Sequence[BundleContrast], data: str, split: Split
) -> dict[str, Any]:
    """Return the content of `profile.json`."""
    return {
        "dataset": data,
        "split": split.name,
        "images": len(split),
        "bundles": [
            {
                "name": profile.name,
                "model": profile.bundle.model.config.name,
                "family": profile.bundle.model.config.family,
                "measures": {name: _to_json(number) for name, number in profile.numbers.items()},
                "accuracy": {name or "unchanged": _to_json(number) for name, number in profile.accuracies.items()},
                "distances": profile.distances,
                "areas": profile.areas,
                "similarity": None if profile.similarity is None else profile.similarity.round(4).tolist(),
                "cost": profile.cost,
            }
            for profile in profiles
        ],
        "pairs": [
            {
                "one": pair.first,
                "other": pair.second,
                "measure": pair.measure,
                "difference": pair.difference.value,
                "interval": list(pair.difference.interval(pair.level)),
                "tells": pair.is_significant,
            }
            for pair in pairs
        ],
    }


def _to_json(number: Measurement) -> dict[str, Any]:
    reference = (
        {} if number.reference is None else {"reference": number.reference, "reference_is": number.reference_kind}
    )
    return {"value": number.estimate.value, "interval": list(number.interval), **reference}
