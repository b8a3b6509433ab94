"""Estimates and their intervals under simulated noise, and the rules that decide verdicts."""

import math

import numpy as np
import pytest
from scipy import stats

from vitrail.core.intervals import t_quantile, t_tail
from vitrail.lab.question import Verdict
from vitrail.lab.statistics import (
    Estimate,
    PowerLaw,
    accuracy,
    central_interval,
    combine,
    contrast,
    crossover,
    difference,
    draw_accuracies,
    extrapolated_crossover,
    fit_power_law,
    log_errors,
    lost_skill,
    mean_of,
    sample_efficiency,
    smallest,
)

LEVEL = 0.05
EXPERIMENTS = 4000
MONTE_CARLO = 2 * math.sqrt(0.05 * 0.95 / EXPERIMENTS)
"""Two standard errors of a coverage of 95 % over the simulated experiments."""


# Variance components


def crossed_table(generator, seeds, images, *, seed=1.0, image=1.0, residual=1.0):
    """Draw a table (seeds, images) with normal effects of these standard deviations."""
    effects = seed * generator.normal(size=(seeds, 1)) + image * generator.normal(size=images)
    return effects + residual * generator.normal(size=(seeds, images))


def test_contrast_matches_hendersons_method():
    """Henderson's method 1 (Biometrics 9, 1953) equates uncorrected sums of squares with their expectations."""
    table = crossed_table(np.random.default_rng(0), 5, 40)
    seeds, images = table.shape
    total, mean = np.square(table).sum(), table.size * table.mean() ** 2
    by_seed, by_image = images * np.square(table.mean(axis=1)).sum(), seeds * np.square(table.mean(axis=0)).sum()
    # Rows: expectations of the four sums. Columns: squared mean, variances of images, of seeds, and of the residual.
    expectations = [
        [table.size, table.size, table.size, table.size],
        [table.size, seeds, table.size, seeds],
        [table.size, table.size, images, images],
        [table.size, seeds, images, 1],
    ]
    _, image, seed, residual = np.linalg.solve(expectations, [total, by_seed, by_image, mean])
    estimate = contrast([(1.0, table)])
    assert estimate.image_error**2 == pytest.approx(image / images)
    assert estimate.residual_error**2 == pytest.approx(residual / table.size)
    assert estimate.error**2 == pytest.approx(seed / seeds + image / images + residual / table.size)
    assert (estimate.value, estimate.freedom) == (pytest.approx(table.mean()), seeds - 1)


def test_contrast_of_seeds_alone_is_the_t_interval():
    by_seed = np.array([[0.7], [0.9], [0.85], [0.8]])
    interval = stats.t.interval(0.95, 3, by_seed.mean(), stats.sem(by_seed[:, 0]))
    assert contrast([(1.0, by_seed)]).interval() == pytest.approx(interval)
    assert mean_of(by_seed[:, 0]).interval() == pytest.approx(interval)


def test_one_seed_gives_no_interval():
    right = np.ones((1, 50)) > 0
    for estimate in (accuracy(right), difference(right, ~right), mean_of([1.0])):
        assert math.isnan(estimate.error)
        assert Verdict("C1", "trained", estimate).state(LEVEL) == "cannot tell"


def test_contrast_pairs_seeds_and_images():
    """Effects of seeds and images that two variants share do not count. Those of one variant do."""
    generator = np.random.default_rng(0)
    shared = crossed_table(generator, 4, 500, seed=5, image=5, residual=0)
    first, second = (shared + crossed_table(generator, 4, 500, seed=0.1, image=0.5) for _ in range(2))
    paired = difference(first, second)
    assert paired.error < 0.2
    assert accuracy(first).error > 4 * paired.error
    assert paired == contrast([(1.0, first), (-1.0, second)])
    assert difference(first, first).error == 0


# Coverage


def simulate(generator, seeds, images, image_share, count):
    """Draw estimates of zero with a standard error of one: values, and variances from seeds and from images.

    `image_share` is the share of the test images in the variance of the estimate. Half of the other part is residual.
    """
    residual = (1 - image_share) / 2
    seed_variance = (1 - image_share) * generator.chisquare(seeds - 1, count) / (seeds - 1)
    freedom = (seeds - 1) * (images - 1)
    residual_square = residual * generator.chisquare(freedom, count) / freedom
    image_square = (residual + image_share) * generator.chisquare(images - 1, count) / (images - 1)
    return generator.normal(size=count), seed_variance, np.maximum(image_square - residual_square, 0)


def half_widths(seeds, level, seed_variance, image_variance):
    """Return the half widths of intervals: the root of the sum of squares of those for seeds and for images."""
    t, z = stats.t.ppf(1 - level / 2, seeds - 1), stats.norm.ppf(1 - level / 2)
    return np.sqrt(t**2 * seed_variance + z**2 * image_variance)


@pytest.mark.parametrize("images", [360, 2000, 10_000])
@pytest.mark.parametrize("seeds", [3, 4, 5, 8, 12])
def test_intervals_have_their_coverage_and_width(seeds, images):
    """With three or four seeds, intervals are longer than necessary if images contribute half of the variance."""
    generator = np.random.default_rng([0, seeds, images])
    for image_share in (0.0, 0.2, 0.4, 0.6, 0.8):
        values, seed_variance, image_variance = simulate(generator, seeds, images, image_share, EXPERIMENTS)
        reaches = half_widths(seeds, LEVEL, seed_variance, image_variance)
        coverage = np.mean(np.abs(values) < reaches)
        assert 0.94 - MONTE_CARLO < coverage < (0.965 if seeds >= 5 else 0.98) + MONTE_CARLO
        if seeds >= 5:
            freedom = (seeds - 1) / (1 - image_share) ** 2  # Satterthwaite's
            assert reaches.mean() < 1.12 * stats.t.ppf(1 - LEVEL / 2, freedom)
        variance = seed_variance[0] + image_variance[0]
        estimate = Estimate(values[0], math.sqrt(variance), seeds - 1, math.sqrt(image_variance[0]))
        low, high = estimate.interval()
        assert (high - low) / 2 == pytest.approx(reaches[0])


@pytest.mark.parametrize("level", [0.01, 0.002, 0.001])
@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_errors_at_the_small_levels_of_multiple_comparisons_are_at_most_nominal(seeds, level):
    generator = np.random.default_rng([1, seeds])
    for image_share in (0.0, 0.05, 0.1, 0.3):
        values, seed_variance, image_variance = simulate(generator, seeds, 2000, image_share, 200_000)
        errors = np.mean(np.abs(values) > half_widths(seeds, level, seed_variance, image_variance))
        assert errors < 1.1 * level + 3 * math.sqrt(level / 200_000)


@pytest.mark.parametrize("image_error", [0.0, 0.004, 0.02])
def test_p_value_is_the_level_whose_interval_ends_at_zero(image_error):
    for value in (0.001, -0.02, 0.05, 0.2):
        estimate = Estimate(value, math.hypot(0.01, image_error), 4, image_error)
        low, high = estimate.interval(estimate.p_value)
        assert min(abs(low), abs(high)) == pytest.approx(0, abs=1e-6)


def test_equal_accuracies_of_few_seeds_have_an_error():
    """All seeds may make the same number of mistakes by chance."""
    right = np.ones((3, 360))
    for seed, image in enumerate((5, 17, 200)):
        right[seed, image] = 0
    estimate = accuracy(right)
    assert estimate.image_error == 0
    assert estimate.error == pytest.approx(math.sqrt(1 / 360 * (1 - 1 / 360) / 1080), rel=0.01)


class Classifiers:
    """Models that classify an image correctly if their skill exceeds its difficulty. Seeds add noise to the skill."""

    SEEDS, IMAGES = 5, 360

    def __init__(self, skills, seed_noises):
        self.skills, self.seed_noises = skills, seed_noises

    def draw(self, generator):
        """Return the correctness (seeds, images) of each model."""
        shape = (len(self.skills), self.SEEDS, self.IMAGES)
        difficulty = 2 * generator.standard_normal(self.IMAGES, dtype=np.float32)
        own = 0.5 * generator.standard_normal((len(self.skills), 1, self.IMAGES), dtype=np.float32)
        seed = np.multiply(np.array(self.seed_noises)[:, None, None], generator.normal(size=(*shape[:2], 1)))
        skill = np.array(self.skills)[:, None, None] + seed
        return generator.standard_normal(shape, dtype=np.float32) + own + difficulty < skill

    def accuracies(self):
        """Return the true accuracies."""
        return [
            stats.norm.cdf(skill / math.sqrt(1 + 4 + 0.25 + noise**2))
            for skill, noise in zip(self.skills, self.seed_noises, strict=True)
        ]


def coverage_of(classifiers, estimate, truth):
    """Return how often the interval of an estimate contains its true value."""
    generator = np.random.default_rng(0)
    estimates = (estimate(*classifiers.draw(generator)) for _ in range(EXPERIMENTS))
    intervals = (estimate.interval() for estimate in estimates)
    return np.mean([low < truth < high for low, high in intervals])


@pytest.mark.parametrize(
    "seed_noises", [(0.1, 0.1, 0.1, 0.1), (0.4, 0.1, 0.1, 0.1)], ids=["equal noise", "noisy variant"]
)
def test_intervals_of_real_predictions_have_their_coverage(seed_noises):
    """Correct or wrong predictions, with four times as much seed noise in one variant."""
    classifiers, weights = Classifiers((3.0, 2.5, 1.0, 1.2), seed_noises), (1.0, -1.0, -1.0, 1.0)
    first, second, third, fourth = classifiers.accuracies()
    pair = Classifiers((3.0, 2.5), seed_noises[:2])
    chance = 0.1

    def of_four(*rights):
        return contrast(list(zip(weights, rights, strict=True)))

    def of_log_errors(*rights):
        return log_errors(list(zip(weights, rights, strict=True)))

    log_truth = sum(w * math.log(1 - share) for w, share in zip(weights, classifiers.accuracies(), strict=True))
    for model, estimate, truth in (
        (pair, difference, first - second),
        (classifiers, of_four, first - second - third + fourth),
        (classifiers, of_log_errors, log_truth),
        (
            pair,
            lambda original, changed: lost_skill(original, changed, chance),
            1 - (second - chance) / (first - chance),
        ),
    ):
        assert 0.94 - MONTE_CARLO < coverage_of(model, estimate, truth) < 0.965 + MONTE_CARLO


# The smallest of several


def draw_leads(generator, variants):
    """Draw the leads of several variants over one reference, with three seeds each."""
    *groups, reference = generator.normal(size=(variants + 1, 3))
    return [mean_of(group - reference) for group in groups]


def test_smallest_of_equal_values_is_rarely_contradicted():
    generator = np.random.default_rng(0)
    estimates = [smallest(draw_leads(generator, 6)) for _ in range(1500)]
    # 0.025 is the level. An interval of the smallest alone would give 0.09.
    assert np.mean([estimate.value < 0 and estimate.p_value < LEVEL for estimate in estimates]) < 0.03


def test_smallest_is_above_zero_only_if_every_part_is():
    sure, unsure = Estimate(0.02, 0.001, 20), Estimate(0.03, 0.02, 20)
    estimate = smallest([sure, unsure])
    assert estimate.value == 0.02
    assert estimate.interval() == pytest.approx((unsure.interval()[0], sure.interval(LEVEL / 2)[1]))
    assert Verdict("C1", "trained", estimate).state(LEVEL) == "cannot tell"
    assert Verdict("C1", "trained", smallest([sure, sure])).state(LEVEL) == "supported"
    assert smallest([sure, None]) is None
    assert math.isnan(smallest([sure, Estimate(0.1, math.nan, 0)]).error)


@pytest.mark.parametrize("values", [(0.03, 0.02), (-0.03, 0.02), (-0.03, -0.05), (0.0, 0.001)])
def test_p_value_of_the_smallest_is_the_level_whose_interval_ends_at_zero(values):
    estimate = smallest([Estimate(value, 0.01, 8) for value in values])
    p = estimate.p_value
    low, high = estimate.interval(min(p * 1.01, 1))
    is_beyond = low > 0 or high < 0
    low, high = estimate.interval(p * 0.99)
    assert low < 0 < high
    assert is_beyond or p == 1


def test_smallest_inherits_cut_off_rates_and_the_lowest_range():
    certain = Estimate(0.1, 0.001, 10)
    dependent = Estimate(0.2, 0.001, 10, rates=(-0.1, 0.5))
    cut_off = certain._replace(value=0.3, is_cut_off=True)
    assert Verdict("C1", "trained", smallest([certain, certain])).doubt is None
    assert Verdict("C1", "trained", smallest([certain, dependent])).doubt == "rate-dependent"
    assert smallest([certain, dependent]).rates == (-0.1, 0.1)
    assert Verdict("C1", "trained", smallest([certain, cut_off])).doubt == "cut-off"
    below = Estimate(-0.1, 0.001, 10)
    assert Verdict("C1", "trained", smallest([below, dependent])).state(LEVEL) == "contradicted"


# Functions of accuracies


def test_log_errors_are_paired_and_match_the_bootstrap():
    generator = np.random.default_rng(0)
    hard = generator.normal(size=4000)
    rights = [np.stack([hard + generator.normal(0, 0.3, 4000) < cut] * 2).astype(float) for cut in (1.0, 1.1, 0.2, 0.3)]
    weights = (1.0, -1.0, -1.0, 1.0)
    estimate = log_errors(list(zip(weights, rights, strict=True)))
    wrong = [1 - right.mean() for right in rights]
    assert estimate.value == pytest.approx(sum(w * math.log(share) for w, share in zip(weights, wrong, strict=True)))
    draws = []
    for _ in range(400):
        sample = generator.integers(4000, size=4000)
        shares = [1 - right[:, sample].mean() for right in rights]
        draws.append(sum(w * math.log(share) for w, share in zip(weights, shares, strict=True)))
    assert estimate.error == pytest.approx(np.std(draws), rel=0.15)


def test_lost_skill_is_the_lost_share_above_chance():
    generator = np.random.default_rng(0)

    def draw():
        return [generator.random((6, 4000)) < share for share in (0.9, 0.5)]

    original, changed = draw()
    estimate = lost_skill(original, changed, 0.1)
    assert estimate.value == pytest.approx(0.5, abs=0.02)
    draws = [lost_skill(*draw(), 0.1) for _ in range(300)]
    errors = [each.error for each in draws]
    assert np.mean(errors) == pytest.approx(np.std([each.value for each in draws]), rel=0.15)
    assert math.isnan(lost_skill(changed * 0, changed, 0.1).error)


def test_draw_accuracies_share_images_and_include_seed_noise():
    generator = np.random.default_rng(7)
    right = np.stack([generator.random(400) < 0.7] * 2).astype(float)
    same = draw_accuracies([right, right])
    assert np.ptp(same[:, 0] - same[:, 1]) == 0  # the images and the seeds are the same
    assert same[:, 0].std() == pytest.approx(math.sqrt(0.21 / 400), rel=0.15)
    shifts = np.array([0.3, -0.1, -0.1, -0.1])[:, None]
    constant = np.full((4, 400), 0.5)
    apart = draw_accuracies([constant + shifts, constant])
    wide = 0.1 * stats.t.ppf(0.975, 3)  # the seeds have a standard error of 0.1
    assert central_interval((apart[:, 0] - apart[:, 1]).tolist())[1] == pytest.approx(wide, rel=0.25)
    assert central_interval([1.0] * 390 + [math.inf] * 10) == (1.0, 1.0)
    assert math.isinf(central_interval([1.0] * 380 + [math.inf] * 20)[1])


# More seeds and images


def test_rescaled_divides_each_variance_by_its_own_number():
    estimate = contrast([(1.0, crossed_table(np.random.default_rng(0), 5, 40))])
    seeds = estimate.seed_variance - estimate.residual_error**2
    rescaled = estimate.rescaled(4, 9)
    assert rescaled.error**2 == pytest.approx(seeds / 4 + estimate.residual_error**2 / 36 + estimate.image_error**2 / 9)
    assert rescaled.image_error == pytest.approx(estimate.image_error / 3)
    assert rescaled.freedom == 4 * 5 - 1
    assert estimate.rescaled(1, 1).error == pytest.approx(estimate.error)


def test_would_exclude_zero_needs_enough_seeds_and_images():
    """Twice the error needs four times as many seeds. Seeds do not reduce the error from test images."""
    estimate = Estimate(0.01, 0.02, 10)
    assert not estimate.would_exclude_zero(seeds=15)
    # With 17 times the seeds, the t quantile at 186 degrees of freedom times 0.02 / sqrt(17) is below 0.01.
    assert estimate.would_exclude_zero(seeds=17)
    assert not Estimate(0.01, 0.02, 10, image_error=0.006).would_exclude_zero(seeds=1e9)
    assert Estimate(0.01, 0.02, 10, image_error=0.006).would_exclude_zero(seeds=1e3, images=2)


# Distributions and curves


def test_student_distribution_matches_scipy():
    for freedom in (1, 2.5, 7, 40, 1e5):
        for t in (0.0, 0.3, 2.0, 9.0):
            assert t_tail(t, freedom) == pytest.approx(stats.t.sf(t, freedom), rel=1e-9)
        assert t_quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    assert t_quantile(0.975, math.inf) == pytest.approx(1.959964, rel=1e-6)


def test_combine_matches_welch_test():
    values, other_values = np.array([1.0, 2.0, 4.0]), np.array([2.0, 2.5, 3.0, 9.0])
    parts = [Estimate(x.mean(), x.std(ddof=1) / math.sqrt(len(x)), len(x) - 1) for x in (values, other_values)]
    combined = combine((1.0, parts[0]), (-1.0, parts[1]))
    expected = stats.ttest_ind(values, other_values, equal_var=False)
    assert combined.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert combined.freedom == pytest.approx(expected.df, rel=1e-9)
    assert combined.interval() == pytest.approx(tuple(expected.confidence_interval()), rel=1e-9)


def test_power_law_sample_efficiency_and_crossover_match_known_curves():
    counts = [300, 1000, 3000, 10000, 30000]
    law = PowerLaw(0.07, 5, 0.5)
    fitted = fit_power_law(counts, law(np.array(counts)).tolist())
    assert fitted == pytest.approx(law, rel=0.03)
    assert fit_power_law(counts[:3], law(np.array(counts[:3])).tolist()) is None  # a power law fits any three points
    ahead, behind = [0.5, 0.6, 0.7, 0.8, 0.9], [0.4, 0.5, 0.6, 0.7, 0.8]
    assert sample_efficiency(counts, ahead, behind) == pytest.approx(math.sqrt(10), rel=0.05)
    assert crossover(counts, ahead, behind) is None
    assert crossover([1, 100], [0.2, 0.0], [0.1, 0.1]) == pytest.approx(10)


def test_extrapolated_crossover_is_where_the_power_laws_meet():
    counts = [300, 1000, 3000, 10000]
    fast, slow = ([1 - float(law(n)) for n in counts] for law in (PowerLaw(0.0, 8, 0.5), PowerLaw(0.0, 2, 0.3)))
    assert extrapolated_crossover(counts, fast, slow) == counts[-1]  # they met at 1,024, within the range
    steep, flat = ([1 - float(law(n)) for n in counts] for law in (PowerLaw(0.0, 20, 0.5), PowerLaw(0.0, 1, 0.2)))
    assert extrapolated_crossover(counts, steep, flat) == pytest.approx(20 ** (1 / 0.3), rel=0.05)
    assert math.isinf(extrapolated_crossover(counts[:2], flat[:2], steep[:2]))  # two points have no power law
    assert math.isinf(extrapolated_crossover(counts[:3], flat[:3], steep[:3]))  # neither do three
