"""Estimates with uncertainty from seeds and from test images.

A comparison trains every variant under the same seeds and evaluates all models on the same test images. So the
difference of two variants, or any weighted sum of several, is one number per seed and image. Seeds and images are
crossed random effects, and the variance of the mean is estimated from the mean squares of their table:

    variance = seeds + images
    seeds    = variance of the means per seed / S
    images   = (mean square of images - mean square of the residual) / (S I), at least 0

The variance of the means per image contains noise of the seeds; the residual removes it. Nothing is pooled over
variants: a model that varies more than the others between seeds has a wide interval of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vitrail.core.intervals import t_quantile, t_tail

LEVEL = 0.05
"""Level of all intervals together: 95 % coverage."""
_MAX_COUNT = 1e12  # largest number of images for extrapolation
_DRAWS = 400
_MIN_ERROR_RATE = 1e-4  # lower error rates have no reliable logarithm


class Training(NamedTuple):
    """A variant that an estimate rests on, with the cost of one more seed."""

    variant: str
    """Identifies the variant, so that the cost of two estimates counts it once."""
    seeds: int
    """Number of seeds that it was run with."""
    seconds: float
    """Processor seconds per seed. Not a number if they were not measured."""


class Estimate(NamedTuple):
    """A value with its standard error, and the conditions for a decision."""

    value: float
    error: float
    freedom: float = math.inf
    """Degrees of freedom of the part of the error that comes from seeds."""
    image_error: float = 0.0
    """Part of the error that comes from the test images. More seeds do not reduce it."""
    residual_error: float = 0.0
    """Part of the error from seeds that more test images would reduce."""
    is_cut_off: bool = False
    """Whether the best learning rate of a model may lie outside the range that was tried."""
    rates: tuple[float, float] | None = None
    """Smallest and largest value over all learning rates that may be the best ones. None if rates play no part."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest possible true value, 0 and 1 for an accuracy."""
    parts: tuple["Estimate", ...] = ()
    """For the smallest of several estimates: all of them."""
    trainings: frozenset[Training] = frozenset()
    """The variants that more seeds would train."""

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
        reach = self._reach(level / 2)
        return max(self.value - reach, self.bounds[0]), min(self.value + reach, self.bounds[1])

    def _reach(self, tail: float) -> float:
        """Return the half width of the interval with the probability `tail` beyond each end.

        It is the root of the sum of squares of two half widths: Student's for seeds, and the normal distribution's for
        images, whose variance is practically known. One t interval for both, with degrees of freedom by Satterthwaite's
        rule, is too short at the small levels of multiple comparisons.
        """
        seeds = t_quantile(1 - tail, self.freedom) * math.sqrt(self.seed_variance) if self.seed_variance else 0.0
        return math.hypot(seeds, t_quantile(1 - tail, math.inf) * self.image_error)

    @property
    def seed_variance(self) -> float:
        """Part of the squared error that comes from seeds."""
        return max(self.error**2 - self.image_error**2, 0.0)

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
        probability = self._tail_beyond(abs(self.value))
        return probability if sign * self.value >= 0 else 1 - probability

    def _tail_beyond(self, distance: float) -> float:
        """Return the tail probability whose half width is a distance."""
        if not self.image_error:
            return t_tail(distance / self.error, self.freedom)
        if not self.seed_variance:
            return t_tail(distance / self.error, math.inf)
        low, high = math.log(1e-12), math.log(0.5)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._reach(math.exp(middle)) > distance else (low, middle)
        return math.exp(high)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return combine((1.0, self), (-1.0, other))

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest value over all learning rates that may be the best ones."""
        return (self.value, self.value) if self.rates is None else self.rates

    @property
    def depends_on_rates(self) -> bool:
        """Whether other learning rates that may be the best ones would change the sign of the value."""
        low, high = self.range
        return self.rates is not None and low <= 0 <= high

    def would_exclude_zero(self, level: float = LEVEL, *, seeds: float = 1.0, images: float = 1.0) -> bool:
        """Return whether the interval would exclude 0 with `seeds` and `images` times as many seeds and test images.

        The current value is assumed to be the true one.
        """
        low, high = self.rescaled(seeds, images).interval(level)
        return low > 0 or high < 0

    def rescaled(self, seeds: float, images: float) -> "Estimate":
        """Return the estimate for `seeds` and `images` times as many seeds and test images."""
        if self.parts:
            return self._replace(parts=tuple(part.rescaled(seeds, images) for part in self.parts))
        residual = min(self.residual_error**2, self.seed_variance)
        seed_variance = (self.seed_variance - residual + residual / images) / seeds
        image_variance = self.image_error**2 / images
        return self._replace(
            error=math.sqrt(seed_variance + image_variance),
            image_error=math.sqrt(image_variance),
            residual_error=math.sqrt(residual / images / seeds),
            freedom=seeds * (self.freedom + 1) - 1,
        )


def combine(*terms: tuple[float, Estimate]) -> Estimate:
    """Return a weighted sum of independent estimates. Degrees of freedom are by Satterthwaite's rule."""

    def total(errors: Sequence[float]) -> float:
        return math.hypot(*(weight * error for (weight, _), error in zip(terms, errors, strict=True)))

    estimates = [estimate for _, estimate in terms]
    variances = [(weight**2 * estimate.seed_variance, estimate.freedom) for weight, estimate in terms]
    spread = sum(variance**2 / freedom for variance, freedom in variances if variance)
    return Estimate(
        sum(weight * estimate.value for weight, estimate in terms),
        total([estimate.error for estimate in estimates]),
        sum(variance for variance, _ in variances) ** 2 / spread if spread else math.inf,
        total([estimate.image_error for estimate in estimates]),
        total([estimate.residual_error for estimate in estimates]),
        any(estimate.is_cut_off for estimate in estimates),
        sum_ranges([(weight, estimate.range) for weight, estimate in terms])
        if any(estimate.rates for estimate in estimates)
        else None,
        trainings=union_of_trainings(estimates),
    )


def union_of_trainings(estimates: Sequence[Estimate]) -> frozenset[Training]:
    """Return the variants that any of the estimates rests on."""
    return frozenset().union(*(estimate.trainings for estimate in estimates))


def sum_ranges(terms: Sequence[tuple[float, tuple[float, float]]]) -> tuple[float, float]:
    """Return the range of a weighted sum from the ranges of its terms."""
    ends = [sorted((weight * low, weight * high)) for weight, (low, high) in terms]
    return sum(low for low, _ in ends), sum(high for _, high in ends)


def complement(estimate: Estimate, upper: float = math.inf) -> Estimate:
    """Return 1 - share. `upper` is the largest possible true value."""
    rates = None if estimate.rates is None else (1 - estimate.rates[1], 1 - estimate.rates[0])
    return estimate._replace(value=1 - estimate.value, rates=rates, bounds=(-math.inf, upper))


def mean_of(values: Sequence[float] | np.ndarray, image_error: float = 0.0) -> Estimate:
    """Return the mean over seeds of one value per seed.

    `image_error` is the additional standard error of the mean from test images. The error of a single seed is unknown.
    """
    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return Estimate(mean, math.nan, 0)
    variance = float(np.var(values, ddof=1)) / count
    return Estimate(mean, math.sqrt(variance + image_error**2), count - 1, image_error)


Term = tuple[float, np.ndarray]
"""A weight and the correctness (seeds, images) of a model on the same images and under the same seeds."""


def contrast(terms: Sequence[Term]) -> Estimate:
    """Return a weighted sum of mean accuracies."""
    values_SI = sum(weight * right.astype(np.float64) for weight, right in terms)
    assert isinstance(values_SI, np.ndarray)
    seeds, images = values_SI.shape
    by_seed, by_image = values_SI.mean(axis=1), values_SI.mean(axis=0)
    if seeds < 2 or images < 2:
        return mean_of(by_seed)
    image_square = seeds * by_image.var(ddof=1)
    total_square = np.square(values_SI - values_SI.mean()).sum()
    seed_square = images * by_seed.var(ddof=1)
    residual = max(total_square - (seeds - 1) * seed_square - (images - 1) * image_square, 0.0)
    residual_square = residual / ((seeds - 1) * (images - 1))
    image_error = math.sqrt(max(image_square - residual_square, 0.0) / values_SI.size)
    residual_error = math.sqrt(residual_square / values_SI.size)
    estimate = mean_of(by_seed, image_error)._replace(residual_error=residual_error)
    if not seed_square:  # of few seeds and images, all accuracies may be equal by chance
        estimate = estimate._replace(error=math.hypot(image_error, residual_error))
    return estimate


def difference(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Return the difference of two mean accuracies."""
    return contrast([(1.0, first), (-1.0, second)])


def accuracy(right: np.ndarray) -> Estimate:
    """Return the mean accuracy of a model."""
    return contrast([(1.0, right)])


def lost_skill(original: np.ndarray, changed: np.ndarray, chance: float) -> Estimate:
    """Return the share of the accuracy above chance that a change costs: 0 none, 1 all, below 0 if it helps.

    The error is computed by the delta method.
    """
    before, after = (float(right.mean()) - chance for right in (original, changed))
    if before <= 0:
        return Estimate(0.0, math.nan, 0)
    return contrast([(after / before**2, original), (-1 / before, changed)])._replace(value=1 - after / before)


def log_errors(terms: Sequence[Term]) -> Estimate:
    """Return a weighted sum of log error rates. The error is computed by the delta method."""
    error_rates = [max(1 - float(right.mean()), _MIN_ERROR_RATE) for _, right in terms]
    pairs = list(zip(terms, error_rates, strict=True))
    estimate = contrast([(-weight / rate, right) for (weight, right), rate in pairs])
    return estimate._replace(value=sum(weight * math.log(rate) for (weight, _), rate in pairs))


def log_error_range(low: float, high: float) -> tuple[float, float]:
    """Return the range of the log error rate from the range of the accuracy."""
    return math.log(max(1 - high, _MIN_ERROR_RATE)), math.log(max(1 - low, _MIN_ERROR_RATE))


def within_margin(estimate: Estimate, margin: float) -> Estimate:
    """Return how far a value is from the nearer end of a margin around zero. It is negative beyond the margin."""
    rates = estimate.rates
    if rates is not None:
        low, high = rates
        nearest = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
        rates = (margin - max(abs(low), abs(high)), margin - nearest)
    return estimate._replace(value=margin - abs(estimate.value), rates=rates)


def smallest(estimates: Sequence[Estimate | None]) -> Estimate | None:
    """For a claim over several estimates, return the weakest one. None if any is missing."""
    available = tuple(estimate for estimate in estimates if estimate is not None)
    if not available or len(available) < len(estimates):
        return None
    weakest = min(available, key=lambda estimate: estimate.value)
    if any(math.isnan(estimate.error) for estimate in available):
        return weakest._replace(error=math.nan)
    ranges = [estimate.range for estimate in available]
    rates = (min(low for low, _ in ranges), min(high for _, high in ranges))
    return weakest._replace(
        rates=rates if any(estimate.rates for estimate in available) else None,
        is_cut_off=any(estimate.is_cut_off for estimate in available),
        parts=available,
        trainings=union_of_trainings(available),
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


def log2_count_needed(counts: Sequence[float], accuracies: Sequence[float], level: float) -> float:
    """Return log2 of the number of images at which accuracy reaches a level, by interpolation in log n.

    It is cut at the smallest and the largest number of images.
    """
    n, rising = np.log2(np.asarray(counts, float)), np.maximum.accumulate(np.asarray(accuracies, float))
    if rising[0] >= level or rising[-1] < level:
        return float(n[0] if rising[0] >= level else n[-1])
    index = int(np.argmax(rising >= level))
    share = (level - rising[index - 1]) / (rising[index] - rising[index - 1])
    return float(n[index - 1] + share * (n[index] - n[index - 1]))


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


def draw_accuracies(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Draw accuracies (draws, variants) as other seeds and other test images would give them.

    Each curve holds correctness (seeds, images). In each draw all variants share the same seeds and images.
    """
    generator = np.random.default_rng(0)
    per_image = np.stack([right.mean(axis=0) for right in curves], axis=1)
    count = len(per_image)
    draws = np.stack([generator.multinomial(count, [1 / count] * count) @ per_image / count for _ in range(_DRAWS)])
    seeds = min(map(len, curves))
    by_seed = np.stack([right[:seeds].mean(axis=1) for right in curves], axis=1)
    deviations = (by_seed - by_seed.mean(axis=0)) / math.sqrt(seeds * (seeds - 1))
    # Student draws, because the variance over seeds is an estimate.
    scale = np.sqrt((seeds - 1) / generator.chisquare(seeds - 1, (_DRAWS, 1)))
    return draws + scale * (generator.normal(size=(_DRAWS, seeds)) @ deviations)


def central_interval(draws: Sequence[float]) -> tuple[float, float]:
    """Return the interval that holds the central 95 % of draws, which may contain infinity."""
    low, high = np.quantile(draws, (LEVEL / 2, 1 - LEVEL / 2), method="nearest")
    return float(low), float(high)
