"""Differences with their uncertainty: from seeds, pooled over a question's cells, and from test images, paired.

A difference of two accuracies has two sources of noise: other seeds would train other models, and other images would be
easier for one of them. Both variances are estimated and added.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.evaluation.student import t_quantile, t_tail

LEVEL = 0.05
"""Of all intervals together: 95 %."""


class Estimate(NamedTuple):
    """A number with its standard error and the degrees of freedom of that."""

    value: float
    error: float
    freedom: float = math.inf

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The interval that misses the truth with probability `level`."""
        reach = t_quantile(1 - level / 2, self.freedom) * self.error
        return self.value - reach, self.value + reach

    @property
    def p_value(self) -> float:
        """Of the hypothesis that the truth is 0, two-sided."""
        if self.error == 0:
            return 0.0 if self.value else 1.0
        return 2 * t_tail(abs(self.value) / self.error, self.freedom)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return combine((1.0, self), (-1.0, other))


def combine(*terms: tuple[float, Estimate]) -> Estimate:
    """A sum of independent estimates with weights; degrees of freedom by Satterthwaite's rule."""
    value = sum(weight * one.value for weight, one in terms)
    parts = [(weight * one.error) ** 2 for weight, one in terms]
    variance = sum(parts)
    spread = sum(part**2 / one.freedom for part, (_, one) in zip(parts, terms, strict=True) if part)
    return Estimate(value, math.sqrt(variance), variance**2 / spread if spread else math.inf)


class SeedNoise(NamedTuple):
    """Variance of an accuracy over seeds, pooled over many cells."""

    variance: float
    freedom: int


def pool(groups: Iterable[Sequence[float]]) -> SeedNoise:
    """The variance within groups, each of one cell under several seeds."""
    total, freedom = 0.0, 0
    for values in groups:
        if len(values) > 1:
            total += float(np.var(values, ddof=1)) * (len(values) - 1)
            freedom += len(values) - 1
    return SeedNoise(total / freedom if freedom else math.nan, freedom)


def difference(one: np.ndarray, other: np.ndarray, noise: SeedNoise) -> Estimate:
    """Mean accuracy of one model less that of another, from their right answers (seeds, images) to the same images."""
    return contrast([(1.0, one), (-1.0, other)], noise)


def contrast(terms: Sequence[tuple[float, np.ndarray]], noise: SeedNoise) -> Estimate:
    """A weighted sum of mean accuracies, from right answers (seeds, images) to the same images."""
    per_image = sum(weight * right.mean(axis=0) for weight, right in terms)
    images = float(per_image.var(ddof=1)) / per_image.size
    seeds = noise.variance * sum(weight**2 / len(right) for weight, right in terms)
    if math.isnan(seeds):
        return Estimate(float(per_image.mean()), math.nan, 0)
    return combine(
        (1.0, Estimate(float(per_image.mean()), math.sqrt(images), per_image.size - 1)),
        (1.0, Estimate(0.0, math.sqrt(seeds), noise.freedom)),
    )


def accuracy(right: np.ndarray, noise: SeedNoise) -> Estimate:
    """Mean accuracy of a model from its right answers (seeds, images)."""
    per_image = right.mean(axis=0)
    error = math.sqrt(float(per_image.var(ddof=1)) / per_image.size)
    images = Estimate(float(per_image.mean()), error, per_image.size - 1)
    if math.isnan(noise.variance):
        return Estimate(images.value, math.nan, 0)
    return combine((1.0, images), (1.0, Estimate(0.0, math.sqrt(noise.variance / len(right)), noise.freedom)))


def lost_skill(original: np.ndarray, changed: np.ndarray, noise: SeedNoise, chance: float) -> Estimate:
    """The share of what a model knows beyond chance that a change costs it: 0 for nothing, 1 for all, below 0 if the
    change helps. From right answers (seeds, images) to the same images, by the delta method."""
    before, after = float(original.mean()) - chance, float(changed.mean()) - chance
    if before <= 0:
        return Estimate(0.0, math.nan, 0)
    moved = contrast([(after / before**2, original), (-1 / before, changed)], noise)
    return moved._replace(value=1 - after / before)


def mean_of(values: Sequence[float], noise: SeedNoise) -> Estimate:
    """The mean of a number that was measured under several seeds."""
    error = math.sqrt(noise.variance / len(values)) if noise.freedom else math.nan
    return Estimate(float(np.mean(values)), error, noise.freedom)


def holm(p_values: Mapping[str, float], level: float = LEVEL) -> dict[str, float]:
    """The level at which each of several hypotheses is to be judged, so that all together err with `level` (Holm 1979).

    The smallest p-value is judged most strictly; from the first that is not below its level on, that level stays.
    """
    levels: dict[str, float] = {}
    current, stopped = 0.0, False
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if not stopped:
            current = level / (len(p_values) - rank)
            stopped = not p_values[name] < current
        levels[name] = current
    return levels


class PowerLaw(NamedTuple):
    """error = floor + scale * n ** -exponent."""

    floor: float
    scale: float
    exponent: float

    def __call__(self, count: np.ndarray | float) -> np.ndarray:
        return self.floor + self.scale * np.asarray(count, float) ** -self.exponent


def fit_power_law(counts: Sequence[float], errors: Sequence[float]) -> PowerLaw | None:
    """Least squares in log error over a grid of floors and exponents; None for fewer than three sizes."""
    if len(counts) < 3 or min(errors) <= 0:
        return None
    n, e = np.asarray(counts, float), np.asarray(errors, float)
    best, found = math.inf, None
    for floor in np.linspace(0, 0.999 * e.min(), 120):
        slope, offset = np.polyfit(np.log(n), np.log(e - floor), 1)
        loss = float(np.square(np.log(floor + np.exp(offset) * n**slope) - np.log(e)).sum())
        if slope < 0 and loss < best - 1e-12:
            best, found = loss, PowerLaw(float(floor), float(np.exp(offset)), float(-slope))
    return found


def sample_efficiency(counts: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float | None:
    """How many times more images `other` needs for the accuracy that `one` has, by interpolation in log n: the
    geometric mean over the accuracies that both reach; None if there are none."""
    n = np.log(np.asarray(counts, float))
    a, b = (np.maximum.accumulate(np.asarray(values, float)) for values in (one, other))
    low, high = max(a[0], b[0]), min(a[-1], b[-1])
    if low >= high:
        return None
    levels = np.linspace(low, high, 50)
    return float(np.exp(np.mean(_invert(n, b, levels) - _invert(n, a, levels))))


def _invert(n: np.ndarray, values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    keep = np.concatenate([[True], np.diff(values) > 0])
    return np.interp(levels, values[keep], n[keep])


def crossover(counts: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float | None:
    """The n at which the lead of `one` over `other` changes its sign, by interpolation in log n; the last one."""
    lead = np.asarray(one, float) - np.asarray(other, float)
    n = np.log(np.asarray(counts, float))
    for at in range(len(lead) - 2, -1, -1):
        if lead[at] * lead[at + 1] < 0:
            return float(np.exp(n[at] + (n[at + 1] - n[at]) * lead[at] / (lead[at] - lead[at + 1])))
    return None
