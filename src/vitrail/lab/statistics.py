"""Estimates with uncertainty from seeds, pooled over a question's trials, and from test images, paired.

A difference of two accuracies has two sources of noise: other seeds train other models, and other test images may be
easier for one of the models. Both variances are estimated and added.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vitrail.core.intervals import t_quantile, t_tail

LEVEL = 0.05
"""Level of all intervals together: 95 % coverage."""
_MAX_COUNT = 1e12  # largest number of images for extrapolation
_DRAWS = 400
_MIN_ERROR_RATE = 1e-4  # lower error rates have no reliable logarithm


class Estimate(NamedTuple):
    """A value with its standard error, degrees of freedom, and the conditions for a decision."""

    value: float
    error: float
    freedom: float = math.inf
    image_error: float = 0.0
    """Part of the error that comes from the test images. More seeds do not reduce it."""
    halves: tuple[float, ...] = ()
    """Value from the first and from the second half of the seeds. Empty for one seed."""
    is_cut_off: bool = False
    """Whether the best learning rate of a model may lie outside the range that was tried."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest possible true value, 0 and 1 for an accuracy."""
    parts: tuple["Estimate", ...] = ()
    """For the smallest of several estimates: all of them."""
    seed_freedom: float | None = None
    """Degrees of freedom of the part of the error that comes from seeds. None means those of the whole error."""

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return the interval that misses the true value with probability `level`.

        The smallest of several values is above zero if all are, so each lower end is at `level`. It is below zero if
        any is. That is a multiple comparison, so the upper ends share the level (Bonferroni).
        """
        if self.parts:
            shared = level / len(self.parts)
            return min(part.interval(level)[0] for part in self.parts), min(
                part.interval(shared)[1] for part in self.parts
            )
        reach = t_quantile(1 - level / 2, self.freedom) * self.error
        return max(self.value - reach, self.bounds[0]), min(self.value + reach, self.bounds[1])

    @property
    def p_value(self) -> float:
        """Two-sided p-value of the hypothesis that the true value is 0: the level at which the interval ends at 0."""
        if self.parts:
            above = max(part.tail(1) for part in self.parts)
            below = len(self.parts) * min(part.tail(-1) for part in self.parts)
            return min(2 * min(above, below), 1.0)
        return min(2 * self.tail(1 if self.value > 0 else -1), 1.0)

    def tail(self, sign: int) -> float:
        """Return the one-sided tail probability on the side `sign` (1 or -1) of 0, if the true value is 0."""
        if self.error == 0:
            return 0.0 if sign * self.value > 0 else 1.0
        t = sign * self.value / self.error
        return t_tail(t, self.freedom) if t >= 0 else 1 - t_tail(-t, self.freedom)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return combine((1.0, self), (-1.0, other))

    @property
    def is_steady(self) -> bool:
        """Whether both halves of the seeds agree with the sign of the value."""
        return all(half * self.value > 0 for half in self.halves)

    def would_exclude_zero(self, level: float = LEVEL, *, seeds: float = 1.0, images: float = 1.0) -> bool:
        """Return whether the interval would exclude 0 with `seeds` and `images` times as many seeds and test images.

        The current value is assumed to be the true one.
        """
        low, high = self._rescaled(seeds, images).interval(level)
        return low > 0 or high < 0

    def _rescaled(self, seeds: float, images: float) -> "Estimate":
        """Return the estimate for `seeds` and `images` times as many seeds and test images."""
        if self.parts:
            return self._replace(parts=tuple(part._rescaled(seeds, images) for part in self.parts))
        image_variance = self.image_error**2 / images
        seed_variance = self._seed_variance / seeds
        # Over thousands of test images, the variance is practically known.
        freedom = _satterthwaite(
            [(seed_variance, seeds * (self.seed_freedom or self.freedom)), (image_variance, math.inf)]
        )
        return self._replace(error=math.sqrt(seed_variance + image_variance), freedom=freedom)

    @property
    def _seed_variance(self) -> float:
        return max(self.error**2 - self.image_error**2, 0.0)


def _satterthwaite(parts: Iterable[tuple[float, float]]) -> float:
    """Return the degrees of freedom of a sum of independent variances, from (variance, freedom) of each."""
    nonzero = [(variance, freedom) for variance, freedom in parts if variance]
    spread = sum(variance**2 / freedom for variance, freedom in nonzero)
    return sum(variance for variance, _ in nonzero) ** 2 / spread if spread else math.inf


def combine(*terms: tuple[float, Estimate]) -> Estimate:
    """Return a weighted sum of independent estimates, with degrees of freedom by Satterthwaite's rule."""
    return Estimate(
        sum(weight * estimate.value for weight, estimate in terms),
        math.hypot(*(weight * estimate.error for weight, estimate in terms)),
        _satterthwaite(((weight * estimate.error) ** 2, estimate.freedom) for weight, estimate in terms),
        math.hypot(*(weight * estimate.image_error for weight, estimate in terms)),
        # An exact value is the same for every seed.
        _combine_halves(
            [(weight, estimate.halves if estimate.error else (estimate.value,) * 2) for weight, estimate in terms]
        ),
        any(estimate.is_cut_off for _, estimate in terms),
        seed_freedom=_satterthwaite(
            (weight**2 * estimate._seed_variance, estimate.seed_freedom or estimate.freedom)
            for weight, estimate in terms
        ),
    )


def _combine_halves(terms: Sequence[tuple[float, tuple[float, ...]]]) -> tuple[float, ...]:
    """Return a weighted sum for each half of the seeds. Empty if a term has no halves."""
    if not all(halves for _, halves in terms):
        return ()
    return tuple(sum(weight * halves[half] for weight, halves in terms) for half in (0, 1))


def half_means(values: np.ndarray) -> tuple[float, ...]:
    """Return the means over the first and the second half of the seeds. Empty for one seed."""
    middle = (len(values) + 1) // 2
    return (float(values[:middle].mean()), float(values[middle:].mean())) if len(values) > 1 else ()


def complement(estimate: Estimate, upper: float = math.inf) -> Estimate:
    """Return 1 - share. `upper` is the largest possible true value."""
    halves, bounds = tuple(1 - half for half in estimate.halves), (-math.inf, upper)
    return estimate._replace(value=1 - estimate.value, halves=halves, bounds=bounds)


@dataclasses.dataclass(frozen=True, eq=False)
class SeedNoise:
    """Variance of an accuracy over seeds, pooled over trials. Compared by identity: equal values are two estimates."""

    variance: float
    freedom: int


def pool(groups: Iterable[Sequence[float]]) -> SeedNoise:
    """Pool the variance within groups. A group holds one variant under several seeds."""
    total, freedom = 0.0, 0
    for values in groups:
        if len(values) > 1:
            total += float(np.var(values, ddof=1)) * (len(values) - 1)
            freedom += len(values) - 1
    return SeedNoise(total / freedom if freedom else math.nan, freedom)


def difference(first: np.ndarray, second: np.ndarray, noise: SeedNoise) -> Estimate:
    """Return the difference of two mean accuracies, from correctness (seeds, images) on the same images."""
    return contrast([(1.0, first, noise), (-1.0, second, noise)])


def contrast(terms: Sequence[tuple[float, np.ndarray, SeedNoise]]) -> Estimate:
    """Return a weighted sum of mean accuracies, from correctness (seeds, images) on the same images."""
    per_image = sum(weight * right.mean(axis=0) for weight, right, _ in terms)
    images = math.sqrt(float(per_image.var(ddof=1)) / per_image.size)
    by_seed = [(weight, right.mean(axis=1), noise) for weight, right, noise in terms]
    return sum_of_means(by_seed, images, per_image.size - 1)


def sum_of_means(
    terms: Sequence[tuple[float, Sequence[float] | np.ndarray, SeedNoise]],
    images: float = 0.0,
    freedom: float = math.inf,
) -> Estimate:
    """Return a weighted sum of means over seeds.

    `images` is the additional standard error from the test images, `freedom` its degrees of freedom.
    """
    value = float(sum(weight * np.mean(values) for weight, values, _ in terms))
    # Terms with the same noise share one variance estimate, so its degrees of freedom count once.
    shares: dict[SeedNoise, float] = {}
    for weight, values, noise in terms:
        shares[noise] = shares.get(noise, 0.0) + weight**2 / len(values)
    if not all(noise.freedom for noise in shares):
        return Estimate(value, math.nan, 0)
    halves = _combine_halves([(weight, half_means(np.asarray(values))) for weight, values, _ in terms])
    seeds = (Estimate(0.0, math.sqrt(noise.variance * share), noise.freedom) for noise, share in shares.items())
    sources = (Estimate(value, images, freedom, image_error=images), *seeds)
    return combine(*((1.0, source) for source in sources))._replace(halves=halves)


def accuracy(right: np.ndarray, noise: SeedNoise) -> Estimate:
    """Return the mean accuracy of a model from correctness (seeds, images)."""
    return contrast([(1.0, right, noise)])


def lost_skill(
    original: tuple[np.ndarray, SeedNoise], changed: tuple[np.ndarray, SeedNoise], chance: float
) -> Estimate:
    """Return the share of the accuracy above chance that a change costs: 0 none, 1 all, below 0 if it helps.

    Computed from correctness (seeds, images) on the same images and the seed noise of both, by the delta method.
    """
    before, after = (float(right.mean()) - chance for right, _ in (original, changed))
    if before <= 0:
        return Estimate(0.0, math.nan, 0)
    linearised = contrast([(after / before**2, *original), (-1 / before, *changed)])
    pairs = zip(half_means(original[0]), half_means(changed[0]), strict=False)
    halves = tuple(1 - (half_after - chance) / max(half_before - chance, 1e-6) for half_before, half_after in pairs)
    return linearised._replace(value=1 - after / before, halves=halves)


def log_errors(terms: Sequence[tuple[float, np.ndarray, SeedNoise]]) -> Estimate:
    """Return a weighted sum of log error rates, from correctness (seeds, images) on the same images.

    Its error is computed by the delta method.
    """
    error_rates = [max(1 - float(right.mean()), _MIN_ERROR_RATE) for _, right, _ in terms]
    pairs = list(zip(terms, error_rates, strict=True))
    estimate = contrast([(-weight / rate, right, noise) for (weight, right, noise), rate in pairs])
    logs = [
        (weight, [math.log(max(1 - half, _MIN_ERROR_RATE)) for half in half_means(right)]) for weight, right, _ in terms
    ]
    return estimate._replace(
        value=sum(weight * math.log(rate) for (weight, _, _), rate in pairs),
        halves=_combine_halves([(weight, tuple(halves)) for weight, halves in logs]),
    )


def mean_of(values: Sequence[float], noise: SeedNoise) -> Estimate:
    """Return the mean over seeds."""
    return sum_of_means([(1.0, values, noise)])


def smallest(estimates: Sequence[Estimate | None]) -> Estimate | None:
    """For a claim over several estimates, return the weakest one. None if any is missing."""
    available = tuple(estimate for estimate in estimates if estimate is not None)
    if not available or len(available) < len(estimates):
        return None
    weakest = min(available, key=lambda estimate: estimate.value)
    if any(math.isnan(estimate.error) for estimate in available):
        return weakest._replace(error=math.nan)
    halves = weakest.halves
    if weakest.value > 0 and all(estimate.halves for estimate in available):
        # All estimates must be positive in both halves.
        first, second = (min(estimate.halves[half] for estimate in available) for half in (0, 1))
        halves = (first, second)
    return weakest._replace(
        halves=halves, is_cut_off=any(estimate.is_cut_off for estimate in available), parts=available
    )


class PowerLaw(NamedTuple):
    """error = floor + scale * n ** -exponent."""

    floor: float
    scale: float
    exponent: float

    def __call__(self, count: np.ndarray | float) -> np.ndarray:
        return self.floor + self.scale * np.asarray(count, float) ** -self.exponent


def fit_power_law(counts: Sequence[float], errors: Sequence[float]) -> PowerLaw | None:
    """Fit a power law by least squares in log error over a grid of floors and exponents.

    Return None for fewer than four sizes, because a power law fits any three points, and if no decreasing law fits.
    """
    if len(counts) < 4 or min(errors) <= 0:
        return None
    n, e = np.log(np.asarray(counts, float)), np.asarray(errors, float)
    floors = np.linspace(0, 0.999 * e.min(), 120)
    logs = np.log(e - floors[:, None])
    slopes = (logs - logs.mean(axis=1, keepdims=True)) @ (n - n.mean()) / np.square(n - n.mean()).sum()
    offsets = logs.mean(axis=1) - slopes * n.mean()
    fitted = floors[:, None] + np.exp(offsets[:, None] + slopes[:, None] * n)
    losses = np.where(slopes < 0, np.square(np.log(fitted) - np.log(e)).sum(axis=1), math.inf)
    best_index = int(losses.argmin())
    if math.isinf(losses[best_index]):
        return None
    return PowerLaw(float(floors[best_index]), float(np.exp(offsets[best_index])), float(-slopes[best_index]))


def sample_efficiency(
    counts: Sequence[float], accuracies: Sequence[float], other_accuracies: Sequence[float]
) -> float | None:
    """Return how many times more images the other curve needs for the same accuracy, by interpolation in log n.

    The ratio is a geometric mean over the accuracies that both curves reach. None if there are none.
    """
    n = np.log(np.asarray(counts, float))
    a, b = (np.maximum.accumulate(np.asarray(values, float)) for values in (accuracies, other_accuracies))
    low, high = max(a[0], b[0]), min(a[-1], b[-1])
    if low >= high:
        return None
    levels = np.linspace(low, high, 50)
    return float(np.exp(np.mean(_invert(n, b, levels) - _invert(n, a, levels))))


def _invert(n: np.ndarray, values: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the n at which a curve reaches each level, by linear interpolation."""
    is_rising = np.concatenate([[True], np.diff(values) > 0])
    return np.interp(levels, values[is_rising], n[is_rising])


def crossover(counts: Sequence[float], accuracies: Sequence[float], other_accuracies: Sequence[float]) -> float | None:
    """Return the last n at which two curves cross, by interpolation in log n. None if they do not cross."""
    lead = np.asarray(accuracies, float) - np.asarray(other_accuracies, float)
    n = np.log(np.asarray(counts, float))
    for index in range(len(lead) - 2, -1, -1):
        if lead[index] * lead[index + 1] < 0:
            share = lead[index] / (lead[index] - lead[index + 1])
            return float(np.exp(n[index] + (n[index + 1] - n[index]) * share))
    return None


def extrapolated_crossover(
    counts: Sequence[float], accuracies: Sequence[float], other_accuracies: Sequence[float]
) -> float:
    """Return the n beyond the measured range at which the first power law overtakes the other.

    Infinity if that does not happen below 1e12, or if a curve has no power law.
    """
    laws = [fit_power_law(counts, [1 - value for value in values]) for values in (accuracies, other_accuracies)]
    if laws[0] is None or laws[1] is None:
        return math.inf
    larger_counts = np.geomspace(counts[-1], _MAX_COUNT, 500)
    is_ahead = laws[0](larger_counts) < laws[1](larger_counts)
    return float(larger_counts[int(is_ahead.argmax())]) if is_ahead.any() else math.inf


def draw_accuracies(curves: Sequence[tuple[np.ndarray, SeedNoise]]) -> np.ndarray:
    """Draw accuracies (draws, variants) as other seeds and other test images would give them.

    Each curve holds correctness (seeds, images) and its seed noise. In each draw all variants share the same images.
    """
    generator = np.random.default_rng(0)
    per_image = np.stack([right.mean(axis=0) for right, _ in curves], axis=1)
    count = len(per_image)
    draws = np.stack([generator.multinomial(count, [1 / count] * count) @ per_image / count for _ in range(_DRAWS)])
    factors = {noise: _student_scale(generator, noise.freedom) for _, noise in curves}
    for index, (right, noise) in enumerate(curves):
        error = math.sqrt(noise.variance / len(right))
        draws[:, index] += error * factors[noise] * generator.normal(size=_DRAWS)
    return draws


def _student_scale(generator: np.random.Generator, freedom: float) -> np.ndarray:
    """Return factors that turn normal draws into Student draws, because the variance is an estimate."""
    return np.sqrt(freedom / generator.chisquare(freedom, _DRAWS))


def central_interval(draws: Sequence[float]) -> tuple[float, float]:
    """Return the interval that holds the central 95 % of draws, which may contain infinity."""
    low, high = np.quantile(draws, (LEVEL / 2, 1 - LEVEL / 2), method="nearest")
    return float(low), float(high)
