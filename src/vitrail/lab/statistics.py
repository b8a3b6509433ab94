"""Differences with their uncertainty: from seeds, pooled over a question's cells, and from test images, paired.

A difference of two accuracies has two sources of noise: other seeds would train other models, and other images would be
easier for one of them. Both variances are estimated and added.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.core.intervals import t_quantile, t_tail

LEVEL = 0.05
"""Of all intervals together: 95 %."""
_FARTHEST, _DRAWS = 1e12, 400
_LEAST_WRONG = 1e-4  # error rates below have no logarithm to rely on


class Estimate(NamedTuple):
    """A number with its standard error and the degrees of freedom of that, and what else is asked of it before it
    decides anything."""

    value: float
    error: float
    freedom: float = math.inf
    lasting: float = 0.0
    """The part of the error that more seeds do not lessen: that of the test images."""
    halves: tuple[float, ...] = ()
    """The same number from the first half of the seeds, and from the second; empty for one seed."""
    is_cut_off: bool = False
    """Whether the best learning rate of a model behind it may lie beyond those that were tried."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """What the truth cannot lie beyond: 0 and 1 of an accuracy."""
    among: tuple["Estimate", ...] = ()
    """If it is the smallest of several: all of these."""
    seed_freedom: float | None = None
    """Degrees of freedom of the part of the error that more seeds lessen; those of the whole if None."""

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The interval that misses the truth with probability `level`.

        The smallest of several is above zero if all are: each of their lower ends is at `level`. It is below zero if
        any is, and with so many chances one of them seems so by luck: their upper ends share the level (Bonferroni).
        """
        if self.among:
            shared = level / len(self.among)
            return min(one.interval(level)[0] for one in self.among), min(one.interval(shared)[1] for one in self.among)
        reach = t_quantile(1 - level / 2, self.freedom) * self.error
        return max(self.value - reach, self.bounds[0]), min(self.value + reach, self.bounds[1])

    @property
    def p_value(self) -> float:
        """Of the hypothesis that the truth is 0, two-sided: the level at which the interval just reaches it."""
        if self.among:
            above = max(one.tail(1) for one in self.among)
            below = len(self.among) * min(one.tail(-1) for one in self.among)
            return min(2 * min(above, below), 1.0)
        return min(2 * self.tail(1 if self.value > 0 else -1), 1.0)

    def tail(self, sign: int) -> float:
        """How likely the number would lie at least so far on this side of 0 (1 or -1), were the truth 0."""
        if self.error == 0:
            return 0.0 if sign * self.value > 0 else 1.0
        t = sign * self.value / self.error
        return t_tail(t, self.freedom) if t >= 0 else 1 - t_tail(-t, self.freedom)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return combine((1.0, self), (-1.0, other))

    @property
    def is_steady(self) -> bool:
        """Whether both halves of the seeds have its sign."""
        return all(half * self.value > 0 for half in self.halves)

    def would_tell(self, level: float = LEVEL, *, seeds: float = 1.0, images: float = 1.0) -> bool:
        """Whether its interval would exclude 0 with so many times as many seeds and test images, if the value is the
        truth."""
        low, high = self._grown(seeds, images).interval(level)
        return low > 0 or high < 0

    def _grown(self, seeds: float, images: float) -> "Estimate":
        """The same value from so many times as many seeds and test images."""
        if self.among:
            return self._replace(among=tuple(one._grown(seeds, images) for one in self.among))
        of_images = self.lasting**2 / images
        of_seeds = self._seed_variance / seeds
        # The variance over thousands of test images is as good as known.
        freedom = _satterthwaite([(of_seeds, seeds * (self.seed_freedom or self.freedom)), (of_images, math.inf)])
        return self._replace(error=math.sqrt(of_seeds + of_images), freedom=freedom)

    @property
    def _seed_variance(self) -> float:
        return max(self.error**2 - self.lasting**2, 0.0)


def _satterthwaite(parts: Iterable[tuple[float, float]]) -> float:
    """Degrees of freedom of a sum of independent variances, each with its own."""
    known = [(variance, freedom) for variance, freedom in parts if variance]
    spread = sum(variance**2 / freedom for variance, freedom in known)
    return sum(variance for variance, _ in known) ** 2 / spread if spread else math.inf


def combine(*terms: tuple[float, Estimate]) -> Estimate:
    """A sum of independent estimates with weights; degrees of freedom by Satterthwaite's rule."""
    return Estimate(
        sum(weight * one.value for weight, one in terms),
        math.hypot(*(weight * one.error for weight, one in terms)),
        _satterthwaite(((weight * one.error) ** 2, one.freedom) for weight, one in terms),
        math.hypot(*(weight * one.lasting for weight, one in terms)),
        # What is exact is the same for every seed.
        _combine_halves([(weight, one.halves if one.error else (one.value,) * 2) for weight, one in terms]),
        any(one.is_cut_off for _, one in terms),
        seed_freedom=_satterthwaite(
            (weight**2 * one._seed_variance, one.seed_freedom or one.freedom) for weight, one in terms
        ),
    )


def _combine_halves(terms: Sequence[tuple[float, tuple[float, ...]]]) -> tuple[float, ...]:
    """A weighted sum for each half of the seeds; empty if one of the terms has no halves."""
    if not all(halves for _, halves in terms):
        return ()
    return tuple(sum(weight * halves[at] for weight, halves in terms) for at in (0, 1))


def half_means(values: np.ndarray) -> tuple[float, ...]:
    """Means over the first and the second half of the seeds; empty for one seed."""
    middle = (len(values) + 1) // 2
    return (float(values[:middle].mean()), float(values[middle:].mean())) if len(values) > 1 else ()


def complement(one: Estimate, most: float = math.inf) -> Estimate:
    """1 less a share; `most` is what the truth cannot exceed."""
    halves, bounds = tuple(1 - half for half in one.halves), (-math.inf, most)
    return one._replace(value=1 - one.value, halves=halves, bounds=bounds)


@dataclasses.dataclass(frozen=True, eq=False)
class SeedNoise:
    """Variance of an accuracy over seeds, pooled over many cells. Two of the same value are two estimates."""

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
    return contrast([(1.0, one, noise), (-1.0, other, noise)])


def contrast(terms: Sequence[tuple[float, np.ndarray, SeedNoise]]) -> Estimate:
    """A weighted sum of mean accuracies, from right answers (seeds, images) to the same images."""
    per_image = sum(weight * right.mean(axis=0) for weight, right, _ in terms)
    images = math.sqrt(float(per_image.var(ddof=1)) / per_image.size)
    by_seed = [(weight, right.mean(axis=1), noise) for weight, right, noise in terms]
    return sum_of_means(by_seed, images, per_image.size - 1)


def sum_of_means(
    terms: Sequence[tuple[float, Sequence[float] | np.ndarray, SeedNoise]],
    images: float = 0.0,
    freedom: float = math.inf,
) -> Estimate:
    """A weighted sum of the means of numbers that were measured under several seeds. `images` is the standard error
    that the test images add, with its degrees of freedom."""
    value = float(sum(weight * np.mean(values) for weight, values, _ in terms))
    # Terms of one noise share its estimate: they have its degrees of freedom once, however many they are.
    shares: dict[SeedNoise, float] = {}
    for weight, values, noise in terms:
        shares[noise] = shares.get(noise, 0.0) + weight**2 / len(values)
    if not all(noise.freedom for noise in shares):
        return Estimate(value, math.nan, 0)
    halves = _combine_halves([(weight, half_means(np.asarray(values))) for weight, values, _ in terms])
    seeds = (Estimate(0.0, math.sqrt(noise.variance * share), noise.freedom) for noise, share in shares.items())
    sources = (Estimate(value, images, freedom, lasting=images), *seeds)
    return combine(*((1.0, one) for one in sources))._replace(halves=halves)


def accuracy(right: np.ndarray, noise: SeedNoise) -> Estimate:
    """Mean accuracy of a model from its right answers (seeds, images)."""
    return contrast([(1.0, right, noise)])


def lost_skill(
    original: tuple[np.ndarray, SeedNoise], changed: tuple[np.ndarray, SeedNoise], chance: float
) -> Estimate:
    """The share of what a model knows beyond chance that a change costs it: 0 for nothing, 1 for all, below 0 if the
    change helps. From right answers (seeds, images) to the same images, each with its noise, by the delta method."""
    before, after = (float(right.mean()) - chance for right, _ in (original, changed))
    if before <= 0:
        return Estimate(0.0, math.nan, 0)
    moved = contrast([(after / before**2, *original), (-1 / before, *changed)])
    pairs = zip(half_means(original[0]), half_means(changed[0]), strict=False)
    halves = tuple(1 - (now - chance) / max(first - chance, 1e-6) for first, now in pairs)
    return moved._replace(value=1 - after / before, halves=halves)


def log_errors(terms: Sequence[tuple[float, np.ndarray, SeedNoise]]) -> Estimate:
    """A weighted sum of the logarithms of error rates, from right answers (seeds, images) to the same images, by the
    delta method."""
    wrong = [max(1 - float(right.mean()), _LEAST_WRONG) for _, right, _ in terms]
    pairs = list(zip(terms, wrong, strict=True))
    found = contrast([(-weight / share, right, noise) for (weight, right, noise), share in pairs])
    logs = [
        (weight, [math.log(max(1 - half, _LEAST_WRONG)) for half in half_means(right)]) for weight, right, _ in terms
    ]
    return found._replace(
        value=sum(weight * math.log(share) for (weight, _, _), share in pairs),
        halves=_combine_halves([(weight, tuple(halves)) for weight, halves in logs]),
    )


def mean_of(values: Sequence[float], noise: SeedNoise) -> Estimate:
    """The mean of a number that was measured under several seeds."""
    return sum_of_means([(1.0, values, noise)])


def smallest(estimates: Sequence[Estimate | None]) -> Estimate | None:
    """Of claims about several things at once the one that is least in favour; None if one is missing."""
    known = tuple(one for one in estimates if one is not None)
    if not known or len(known) < len(estimates):
        return None
    least = min(known, key=lambda one: one.value)
    if any(math.isnan(one.error) for one in known):
        return least._replace(error=math.nan)
    halves = least.halves
    if least.value > 0 and all(one.halves for one in known):  # all must hold, in both halves
        first, second = (min(one.halves[at] for one in known) for at in (0, 1))
        halves = (first, second)
    return least._replace(halves=halves, is_cut_off=any(one.is_cut_off for one in known), among=known)


class PowerLaw(NamedTuple):
    """error = floor + scale * n ** -exponent."""

    floor: float
    scale: float
    exponent: float

    def __call__(self, count: np.ndarray | float) -> np.ndarray:
        return self.floor + self.scale * np.asarray(count, float) ** -self.exponent


def fit_power_law(counts: Sequence[float], errors: Sequence[float]) -> PowerLaw | None:
    """Least squares in log error over a grid of floors and exponents; None for fewer than four sizes: through three
    points there is always one, so that it says nothing."""
    if len(counts) < 4 or min(errors) <= 0:
        return None
    n, e = np.log(np.asarray(counts, float)), np.asarray(errors, float)
    floors = np.linspace(0, 0.999 * e.min(), 120)
    logs = np.log(e - floors[:, None])
    slopes = (logs - logs.mean(axis=1, keepdims=True)) @ (n - n.mean()) / np.square(n - n.mean()).sum()
    offsets = logs.mean(axis=1) - slopes * n.mean()
    fitted = floors[:, None] + np.exp(offsets[:, None] + slopes[:, None] * n)
    losses = np.where(slopes < 0, np.square(np.log(fitted) - np.log(e)).sum(axis=1), math.inf)
    best = int(losses.argmin())
    if math.isinf(losses[best]):
        return None
    return PowerLaw(float(floors[best]), float(np.exp(offsets[best])), float(-slopes[best]))


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


def extrapolated_crossover(counts: Sequence[float], one: Sequence[float], other: Sequence[float]) -> float:
    """The n beyond those measured at which the power law of `one` overtakes that of `other`; infinity if it never does
    below a million million, or there is no law."""
    laws = [fit_power_law(counts, [1 - value for value in values]) for values in (one, other)]
    if laws[0] is None or laws[1] is None:
        return math.inf
    beyond = np.geomspace(counts[-1], _FARTHEST, 500)
    ahead = laws[0](beyond) < laws[1](beyond)
    return float(beyond[int(ahead.argmax())]) if ahead.any() else math.inf


def draw_accuracies(curves: Sequence[tuple[np.ndarray, SeedNoise]]) -> np.ndarray:
    """Accuracies (draws, variants) that other seeds and other test images might have given, from right answers (seeds,
    images) to the same images and the noise of their seeds: in each draw all variants have the same images."""
    generator = np.random.default_rng(0)
    per_image = np.stack([right.mean(axis=0) for right, _ in curves], axis=1)
    count = len(per_image)
    found = np.stack([generator.multinomial(count, [1 / count] * count) @ per_image / count for _ in range(_DRAWS)])
    factors = {noise: _student_scale(generator, noise.freedom) for _, noise in curves}
    for at, (right, noise) in enumerate(curves):
        error = math.sqrt(noise.variance / len(right))
        found[:, at] += error * factors[noise] * generator.normal(size=_DRAWS)
    return found


def _student_scale(generator: np.random.Generator, freedom: float) -> np.ndarray:
    """What normal draws are multiplied by if their variance is an estimate."""
    return np.sqrt(freedom / generator.chisquare(freedom, _DRAWS))


def ends_of(draws: Sequence[float]) -> tuple[float, float]:
    """The interval that holds 95 % of some draws; infinity may be among them."""
    low, high = np.quantile(draws, (LEVEL / 2, 1 - LEVEL / 2), method="nearest")
    return float(low), float(high)
