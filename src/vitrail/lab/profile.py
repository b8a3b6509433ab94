"""The bias profile of bundles, without training: how local, how shift-proof, how order-blind they are on some images.

Every number has its interval and an exact or untrained reference, and bundles are compared on the same images.
"""

import dataclasses
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
from vitrail.core.errors import DamagedError, UsageError
from vitrail.core.intervals import wilson
from vitrail.core.settings import Pair
from vitrail.core.terminal import Say
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.labels import match_labels
from vitrail.evaluation.metrics import calibration_bins
from vitrail.evaluation.paired import holm
from vitrail.lab import internals, perturbations
from vitrail.lab.plan import parse_budget
from vitrail.lab.statistics import Estimate
from vitrail.models.config import ModelConfig
from vitrail.models.create import build

MOST, LEAST = 2000, 32
"""Images at most and at least."""
_BYTES = 10**9  # of preprocessed images that are held at once
_LAYERS, _DERIVED, _WATCHED, _COMPARED = 6, 16, 64, 128  # layers and images for gradients, attention, similarity
_TIMED = 5  # batches that tell how long an image takes


class Number(NamedTuple):
    """A measure of one bundle."""

    estimate: Estimate
    values: np.ndarray | None = None
    """Of each image (or, of layers' similarity, without each batch of them), for comparisons on the same images."""
    reference: float | None = None
    """What an untrained model has, or what is exact."""
    kind: str = ""
    """Which of them it is, as the page's words call it."""
    ends: tuple[float, float] | None = None
    """Of a share, its interval, which stays between 0 and 1 and is never empty."""

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %."""
        return self.ends or self.estimate.interval()


@dataclasses.dataclass
class Profile:
    """What was measured of a bundle."""

    name: str
    bundle: Bundle
    numbers: dict[str, Number]
    """By name, in the order of the page."""
    asked: dict[str, Number]
    """Accuracy under each change, and under none (an empty name). `shift 3.5` is by so many per cent of the side."""
    distances: dict[str, list[tuple[float, float]]]
    """How far each head looks, `trained` and `untrained`: (share of the depth, share of uniform attention's)."""
    areas: dict[str, list[tuple[float, float]]]
    """The same of receptive areas."""
    similarity: np.ndarray | None
    bins: list[tuple[int, float, float]]
    """Of calibration: how many answers, how sure, how right."""
    cost: dict[str, float]


class Contrast(NamedTuple):
    """Two bundles compared on the same images."""

    one: str
    other: str
    measure: str
    difference: Estimate
    level: float
    """That Holm's rule leaves for it, over all comparisons of the page."""

    @property
    def tells(self) -> bool:
        """Whether the difference exceeds its noise."""
        low, high = self.difference.interval(self.level)
        return low > 0 or high < 0


def profile(
    data: str | Path | Dataset, bundles: Sequence[str | Path], *, budget: str | None = None, tell: Say
) -> tuple[list[Profile], list[Contrast], Split]:
    """Measure bundles on the test images (or all there are) of a data set. Returns what was found of each, of each two
    of them, and the images."""
    seconds = None if budget is None else parse_budget(budget)
    opened = {name: load(path) for name, path in _names(bundles).items()}
    dataset = open_data(data)
    dataset.check_one_label("A profile")
    places = {}
    for name, bundle in opened.items():
        bundle.parts.check_one_class("A profile")
        places[name], how = match_labels(bundle.labels, bundle.model.config.classes, dataset.labels)
        if how == "as class numbers" and bundle.labels is not None:
            tell(f"note: classes of {name} are matched by number, because their names differ")
    split = dataset.for_evaluation().spread(min(MOST, _count(list(opened.values()), seconds)))
    if len(split) < LEAST:
        raise UsageError(f"Images to profile bundles on must be {LEAST} or more, got {len(split)} in {dataset.name!r}.")
    asks = _asks(list(opened.values()))
    found = []
    for number, (name, bundle) in enumerate(opened.items(), 1):
        tell(f"{number}/{len(opened)}  {name} on {len(split):,} images")
        found.append(_measure(name, bundle, split, places[name][split.labels], asks))
    return found, compare_pairs(found), split


def _names(bundles: Sequence[str | Path]) -> dict[str, str | Path]:
    """Bundles by the last part of their path, or all of it where that is not enough."""
    last = [Path(one).name or str(one) for one in bundles]
    names = {short if last.count(short) == 1 else str(one): one for short, one in zip(last, bundles, strict=True)}
    if len(names) < len(bundles):
        raise UsageError(f"Bundles must differ, got {', '.join(map(str, bundles))}.")
    return names


class Asks(NamedTuple):
    """What is done to the images, the same for all bundles, whatever their resolution."""

    shifts: tuple[float, ...]
    """Distances, as shares of the side."""
    grids: list[Pair]
    """Of blocks that are shuffled."""
    told: Pair
    """The one that is told of in a number: the finest that leaves the patches of all bundles whole, if there is one."""
    leaves_whole: bool
    """Whether it does, for all of them."""
    cells: Pair
    """Of cells that are dropped: patches of the first bundle that has some."""

    def keeps_patches(self, config: ModelConfig) -> bool:
        """Whether the grid that is told of leaves the patches of a model whole; of a model without any, those of all
        others."""
        if not config.patch or config.grid is None:
            return self.leaves_whole
        return all(side % blocks == 0 for side, blocks in zip(config.grid, self.told, strict=True))

    def distances(self, side: int) -> dict[int, float]:
        """Shifts in pixels, and what share of the side each is."""
        return {max(round(share * side), 1): share for share in self.shifts}


def _asks(bundles: Sequence[Bundle]) -> Asks:
    configs = [bundle.model.config for bundle in bundles]
    sides = [min(config.resolution) for config in configs]
    grids = perturbations.shuffle_grids(*(config.resolution for config in configs))
    if not grids:
        sizes = ", ".join(f"{height} x {width}" for height, width in (config.resolution for config in configs))
        raise UsageError(f"Bundles to profile must have images whose sides have a common divisor, got {sizes} px.")
    patched = [config.grid for config in configs if config.patch and config.grid]
    whole = [one for one in grids if all(grid[0] % one[0] == 0 and grid[1] % one[1] == 0 for grid in patched)]
    cells = patched[0] if patched and max(patched[0]) <= min(sides) else (min(14, *sides), min(14, *sides))
    return Asks(
        tuple(far / min(sides) for far in perturbations.shifts(min(sides))),
        grids,
        whole[-1] if whole and patched else grids[min(1, len(grids) - 1)],
        bool(whole),
        cells,
    )


def _count(bundles: Sequence[Bundle], seconds: float | None) -> int:
    """How many images fit the memory and the time."""
    configs = [bundle.model.config for bundle in bundles]
    most = min(_BYTES // (4 * one.channels * one.resolution[0] * one.resolution[1]) for one in configs)
    if seconds is None:
        return most
    shifted, shuffled = len(perturbations.shift_changes(perturbations.shifts(28))), 5
    passes = shifted + shuffled + len(perturbations.SHARES) + 2 * len(perturbations.BANDS) + 1
    cost = sum(passes * _seconds(bundle) for bundle in bundles)
    if seconds < LEAST * cost:
        raise UsageError(f"Budget must be at least {LEAST * cost / 60 + 0.5:.0f}m for these bundles.")
    return min(most, int(seconds / cost))


def _seconds(bundle: Bundle) -> float:
    """Of one forward pass of an image, in batches."""
    config = bundle.model.config
    images = torch.zeros(perturbations.batch_for(config), config.channels, *config.resolution)
    times = []
    with torch.inference_mode():
        for _ in range(_TIMED):
            began = time.perf_counter()
            bundle.model(images)
            times.append((time.perf_counter() - began) / len(images))
    return float(np.median(times[1:]))


def _measure(name: str, bundle: Bundle, split: Split, labels: np.ndarray, asks: Asks) -> Profile:
    model, config = bundle.model, bundle.model.config
    images = bundle.preprocess(list(split.images))
    torch.manual_seed(0)
    untrained = build(config).eval()
    said = perturbations.probabilities(model, images)
    if not np.isfinite(said).all():
        raise DamagedError(OVERFLOWS)
    plain = said.argmax(axis=1)
    right = plain == labels
    distances = asks.distances(min(config.resolution))
    moved = dict(perturbations.ask(model, images, labels, perturbations.shift_changes(distances), plain=plain))
    other = dict(
        perturbations.ask(model, images, labels, perturbations.other_changes(asks.grids, asks.cells), plain=plain)
    )

    chance = 1 / config.classes
    luck = float(np.square(np.bincount(plain, minlength=config.classes) / len(plain)).sum())
    numbers = {"accuracy": _share(right, chance, "chance")}
    stays = np.mean([one.same for one in moved.values()], axis=0)
    numbers["shift"] = _kept(stays, right, 1.0, "exact-shift")
    reference = (1.0, "exact-order") if asks.keeps_patches(config) else (luck, "luck")
    numbers["shuffle"] = _kept(other[f"shuffle {asks.told[0]}"].same, right, *reference)
    for kind, change in (("drop", "drop 0.5"), ("low", "low 0.25"), ("high", "high 0.25")):
        numbers[kind] = _kept(other[change].same, right, luck, "luck")

    asked = {"": numbers["accuracy"]}
    asked |= {change: _share(one.right) for change, one in other.items()}
    for far, share in distances.items():
        asked[f"shift {100 * share:.3g}"] = _number(perturbations.shift_values(moved, right, far)["accuracy"])

    heads, areas = _look_inside(bundle, untrained, images, numbers)
    some = images[:: max(len(images) // _COMPARED, 1)][:_COMPARED]
    similarity, before = (internals.layer_similarity(one, some) for one in (model, untrained))
    if similarity is not None and before is not None:
        numbers["similarity"] = Number(similarity.estimate(), similarity.others, before.estimate().value, "untrained")
    sure = perturbations.calibration(said, right)
    numbers["calibration"] = Number(sure.error, None, sure.by_chance, "calibrated")
    numbers["over"] = _number(sure.over, 0.0, "exact")
    return Profile(
        name,
        bundle,
        numbers,
        asked,
        heads,
        areas,
        None if similarity is None else similarity.table,
        calibration_bins(said.max(axis=1), right),
        {"parameters": config.parameters, "macs": config.macs, "milliseconds": 1000 * _seconds(bundle)},
    )


def _look_inside(
    bundle: Bundle, untrained: Any, images: Tensor, numbers: dict[str, Number]
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, list[tuple[float, float]]]]:
    """Distances of heads and receptive areas, of the model and of the same untrained; adds to `numbers`."""
    models, depth = {"trained": bundle.model, "untrained": untrained}, bundle.model.config.depth
    watched = images[:: max(len(images) // _WATCHED, 1)][:_WATCHED]
    heads = {state: internals.head_distances(model, watched) for state, model in models.items()}
    if heads["trained"]:
        first, last = (heads["trained"][layer] for layer in (0, depth - 1))
        starts = [heads["untrained"][layer] for layer in (0, depth - 1)]
        near = first[:, first.mean(axis=0).argmin()]
        numbers["nearest"] = _number(near, float(starts[0].mean(axis=0).min()), "untrained")
        numbers["first"] = _number(first.mean(axis=1), float(starts[0].mean()), "untrained")
        numbers["last"] = _number(last.mean(axis=1), float(starts[1].mean()), "untrained")
    third = internals.third(depth)
    layers = sorted({third, *np.linspace(0, depth - 1, min(_LAYERS, depth)).round().astype(int).tolist()})
    derived = images[:: max(len(images) // _DERIVED, 1)][:_DERIVED]
    areas = {state: internals.receptive_areas(model, derived, layers) for state, model in models.items()}
    numbers["area"] = _number(areas["trained"][third], float(areas["untrained"][third].mean()), "untrained")
    return (
        {
            state: [(100 * (layer + 1) / depth, float(one)) for layer, some in by.items() for one in some.mean(axis=0)]
            for state, by in heads.items()
        },
        {
            state: [(100 * (layer + 1) / depth, float(some.mean())) for layer, some in by.items()]
            for state, by in areas.items()
        },
    )


def _number(values: np.ndarray, reference: float | None = None, kind: str = "") -> Number:
    return Number(perturbations.mean_of(values), values, reference, kind)


def _share(right: np.ndarray, reference: float | None = None, kind: str = "") -> Number:
    """Of images that are right or not, with Wilson's interval."""
    return _number(right.astype(float), reference, kind)._replace(ends=wilson(int(right.sum()), len(right)))


def _kept(same: np.ndarray, right: np.ndarray, reference: float, kind: str) -> Number:
    """How many of the right answers stay; where all or none do, Wilson's interval."""
    number = _number(perturbations.ratio(same * right, right.astype(float)), reference, kind)
    low, high = number.estimate.interval()
    if number.estimate.error == 0 and right.any():
        low, high = wilson(round(number.estimate.value * right.sum()), int(right.sum()))
    return number._replace(ends=(max(low, 0.0), min(high, 1.0)))


def compare_pairs(found: Sequence[Profile]) -> list[Contrast]:
    """Every two bundles in every measure that both have, on the same images."""
    made = []
    for one, other in combinations(found, 2):
        for measure, number in one.numbers.items():
            theirs = other.numbers.get(measure)
            if theirs is None or number.values is None or theirs.values is None:
                continue
            difference = number.values - theirs.values
            if measure == "similarity":
                estimate = internals.jackknife(number.estimate.value - theirs.estimate.value, difference)
            else:
                estimate = perturbations.mean_of(difference)
            made.append(Contrast(one.name, other.name, measure, estimate, 0.05))
    levels = holm({str(at): one.difference.p_value for at, one in enumerate(made)})
    return [one._replace(level=levels[str(at)]) for at, one in enumerate(made)]


def document(found: Sequence[Profile], pairs: Sequence[Contrast], data: str, split: Split) -> dict[str, Any]:
    """What `profile.json` holds."""
    return {
        "dataset": data,
        "split": split.name,
        "images": len(split),
        "bundles": [
            {
                "name": one.name,
                "model": one.bundle.model.config.name,
                "family": one.bundle.model.config.family,
                "measures": {name: _to_json(number) for name, number in one.numbers.items()},
                "accuracy": {name or "unchanged": _to_json(number) for name, number in one.asked.items()},
                "distances": one.distances,
                "areas": one.areas,
                "similarity": None if one.similarity is None else one.similarity.round(4).tolist(),
                "cost": one.cost,
            }
            for one in found
        ],
        "pairs": [
            {
                "one": pair.one,
                "other": pair.other,
                "measure": pair.measure,
                "difference": pair.difference.value,
                "interval": list(pair.difference.interval(pair.level)),
                "tells": pair.tells,
            }
            for pair in pairs
        ],
    }


def _to_json(number: Number) -> dict[str, Any]:
    known = {} if number.reference is None else {"reference": number.reference, "reference_is": number.kind}
    return {"value": number.estimate.value, "interval": list(number.interval), **known}
