"""The rules of verdicts: doubts, equivalence, Holm's correction, and advice on more seeds and images."""

import math

import numpy as np
import pytest
from scipy import stats

from tests.fake_lab import digits_lab
from vitrail.lab import lab_report
from vitrail.lab.question import Question, Verdict
from vitrail.lab.statistics import Estimate, combine, mean_of, smallest

LEVEL = 0.05


@pytest.mark.parametrize(
    ("value", "error", "state"),
    [
        (0.1, 0.01, "supported"),
        (-0.1, 0.01, "contradicted"),
        (0.01, 0.01, "cannot tell"),
        (0.1, math.nan, "cannot tell"),
    ],
)
def test_verdict_needs_an_interval_that_excludes_zero(value, error, state):
    assert Verdict("C1", "trained", Estimate(value, error, 10)).state(0.05) == state
    one_sided = Verdict("C2", "trained", Estimate(value, error, 10), is_one_sided=True)
    assert one_sided.state(0.05) == ("supported" if state == "supported" else "cannot tell")


def test_verdict_must_not_depend_on_rates_nor_use_rates_that_are_cut_off():
    clear = Estimate(0.1, 0.001, 10, rates=(0.05, 0.15))
    assert Verdict("C1", "trained", clear).state(LEVEL) == "supported"
    for estimate, doubt in (
        (clear._replace(rates=(-0.05, 0.15)), "rate-dependent"),
        (clear._replace(rates=(0.0, 0.15)), "rate-dependent"),
        (clear._replace(is_cut_off=True), "cut-off"),
        (clear._replace(is_cut_off=True, rates=(-0.05, 0.15)), "cut-off"),
    ):
        verdict = Verdict("C1", "trained", estimate)
        assert (verdict.state(LEVEL), verdict.doubt) == ("cannot tell", doubt)


@pytest.mark.parametrize(
    ("rates", "state"),
    [((-0.004, 0.006), "supported"), ((-0.004, 0.012), "cannot tell"), ((-0.012, 0.004), "cannot tell")],
)
def test_equality_must_hold_for_all_rates(rates, state):
    """Rates on both sides of zero do no harm. Rates beyond the margin do."""
    verdict = Verdict("C20", "trained", Estimate(0.001, 0.001, 10, rates=rates), margin=0.01)
    assert verdict.state(LEVEL) == state
    assert verdict.doubt == (None if state == "supported" else "rate-dependent")


@pytest.mark.parametrize(("rates", "state"), [((0.02, 0.05), "contradicted"), ((0.005, 0.05), "cannot tell")])
def test_inequality_must_hold_for_all_rates(rates, state):
    verdict = Verdict("C20", "trained", Estimate(0.03, 0.001, 10, rates=rates), margin=0.01)
    assert verdict.state(LEVEL) == state


# Reasons and advice


def uncertain(value, seeds, images):
    """Return an estimate with errors from seeds (nine degrees of freedom) and from 2,000 test images."""
    return combine((1.0, Estimate(value, images, 1999, image_error=images)), (1.0, Estimate(0.0, seeds, 9)))


@pytest.mark.parametrize(
    ("verdict", "name"),
    [
        (Verdict("C1", "trained"), "not-run"),
        (Verdict("C1", "exact"), "not-run"),
        (Verdict("C1", "trained", Estimate(0.1, math.nan, 0)), "one-seed"),
        (Verdict("C1", "trained", Estimate(0.1, 0.001, 9, rates=(-0.1, 0.3))), "rate-dependent"),
        (Verdict("C1", "trained", Estimate(0.01, 0.02, 9, rates=(-0.1, 0.3))), "more-seeds"),
        (Verdict("C1", "trained", Estimate(0.01, 0.02, 9, is_cut_off=True)), "cut-off"),
        (Verdict("C2", "trained", Estimate(-0.1, 0.001, 9), is_one_sided=True), "beyond-range"),
        (Verdict("C2", "trained", Estimate(-0.01, 0.02, 9), is_one_sided=True), "beyond-range"),
        (Verdict("C2", "trained", Estimate(0.01, 0.02, 9), is_one_sided=True), "more-seeds"),
        (Verdict("C1", "trained", Estimate(0.001, 0.02, 9)), "far-too-few-seeds"),
        (Verdict("C1", "trained", Estimate(0.0, 0.02, 9)), "far-too-few-seeds"),
        (Verdict("C1", "trained", uncertain(0.001, 0.02, 0.001)), "far-too-few"),
        (Verdict("C1", "trained", uncertain(0.01, 0.001, 0.02)), "more-images"),
        (Verdict("C1", "trained", uncertain(0.01, 0.006, 0.019)), "more-of-both"),
        (Verdict("C1", "trained", uncertain(0.01, 0.019, 0.006)), "more-of-both"),
        (Verdict("C20", "trained", Estimate(0.004, 0.02, 9), margin=0.01), "margin-zero"),
        (Verdict("C20", "trained", Estimate(0.0135, 0.0035, 35), margin=0.01), "margin-difference"),
        (Verdict("C1", "trained", Estimate(0.1, 0.001, 9)), None),
    ],
)
def test_undecided_verdict_has_the_right_reason(verdict, name):
    reason = lab_report._undecided_reason(digits_lab(), verdict, LEVEL)
    assert (None if reason is None else reason.name) == name
    for language in ("en", "ko") if reason is not None else ():
        text = reason.text(language)
        assert "{" not in text
        assert text in reason.html()


@pytest.mark.parametrize(
    ("estimate", "name", "sources"),
    [
        (Estimate(0.01, 0.02, 9), "more-seeds", ("seeds",)),
        (Estimate(0.17, 0.065, 2), "more-seeds", ("seeds",)),
        (uncertain(-0.01, 0.02, 0.001), "more-seeds", ("seeds",)),
        (uncertain(0.01, 0.001, 0.02), "more-images", ("images",)),
        (uncertain(0.01, 0.006, 0.019), "more-of-both", ("seeds", "images")),
        (smallest([Estimate(0.01, 0.008, 9), Estimate(0.02, 0.04, 9)]), "more-seeds", ("seeds",)),
    ],
)
def test_remedy_names_the_fewest_sufficient_seeds_and_images(estimate, name, sources):
    """The named number makes the interval exclude zero, one fewer does not."""
    lab, level = digits_lab(), 0.01
    remedy = lab_report._remedy(lab, estimate, level)
    assert remedy.name == name
    (count,) = remedy.fields.values()
    current = lab.seeds if name == "more-seeds" else 1
    for number, is_decided in ((count - 1, False), (count, True)):
        assert estimate.would_exclude_zero(level, **dict.fromkeys(sources, number / current)) == is_decided


def test_remedy_does_not_suggest_images_that_cannot_help():
    """Neither more seeds nor more test images alone exclude zero, because seeds vary too much."""
    estimate = uncertain(-0.0053, 0.0524, 0.0028)
    assert not estimate.would_exclude_zero(seeds=1e12)
    assert not estimate.would_exclude_zero(images=1e12)
    assert lab_report._remedy(digits_lab(), estimate, LEVEL).name == "far-too-few"


def decided_share(generator, effect, image_share, extend):
    """Return the share of undecided experiments with advice that are decided after they were extended as advised.

    The estimate of an experiment has five seeds and a standard error of one.
    """
    decisions = []
    while len(decisions) < 100:
        image_error, spread = math.sqrt(image_share), math.sqrt(5 * (1 - image_share))
        image_effect = image_error * generator.normal()
        by_seed = effect + image_effect + spread * generator.normal(size=5)
        estimate = mean_of(by_seed, image_error)
        if estimate.p_value > LEVEL and (extended := extend(estimate, by_seed, image_effect, spread)) is not None:
            decisions.append(extended.p_value < LEVEL)
    return np.mean(decisions)


@pytest.mark.parametrize(
    ("effect", "image_share", "low", "high"), [(2.0, 0.0, 0.5, 1.0), (2.0, 0.3, 0.5, 1.0), (0.0, 0.0, 0.0, 0.2)]
)
def test_advised_number_of_seeds_decides(effect, image_share, low, high):
    """At least half of the advised experiments are decided, if the true effect is two standard errors.

    If the estimate were the true effect, it would be half: the extended estimate would be above or below its threshold
    with equal probability. An undecided estimate is below this effect on average. Without an effect, following the
    advice is a second chance of a false verdict, which must stay rare.
    """
    generator = np.random.default_rng(0)

    def extend(estimate, by_seed, image_effect, spread):
        seeds = lab_report._smallest_sufficient(5, lambda times: estimate.would_exclude_zero(LEVEL, seeds=times))
        if seeds is None:
            return None
        more = effect + image_effect + spread * generator.normal(size=seeds - 5)
        return mean_of(np.concatenate([by_seed, more]), estimate.image_error)

    assert low <= decided_share(generator, effect, image_share, extend) <= high


def test_advised_number_of_test_images_decides():
    """At least half of the advised experiments are decided, as with seeds."""
    generator = np.random.default_rng(0)

    def extend(estimate, by_seed, image_effect, _spread):
        times = lab_report._smallest_sufficient(1, lambda factor: estimate.would_exclude_zero(LEVEL, images=factor))
        if times is None:
            return None
        more = generator.normal() * estimate.image_error / math.sqrt(times - 1)
        extended_effect = (image_effect + (times - 1) * more) / times
        return mean_of(by_seed - image_effect + extended_effect, estimate.image_error / math.sqrt(times))

    assert decided_share(generator, 2.0, 0.8, extend) >= 0.5


# Equivalence


@pytest.mark.parametrize("value", [-0.016, -0.008, -0.004, 0.0, 0.003, 0.007, 0.012, 0.02])
@pytest.mark.parametrize("error", [0.0005, 0.002, 0.006])
def test_equality_verdict_matches_two_one_sided_tests(value, error):
    """It does not matter whether the interval includes zero: 0.3 +- 0.1 points are equal within one."""
    margin, freedom = 0.01, 12
    above, below = stats.t.sf([(value + margin) / error, (margin - value) / error], freedom)
    apart = min(stats.t.sf([(value - margin) / error, (-margin - value) / error], freedom))
    expected = "supported" if max(above, below) < LEVEL / 2 else "contradicted" if apart < LEVEL / 2 else "cannot tell"
    verdict = Verdict("C20", "trained", Estimate(value, error, freedom), margin=margin)
    assert verdict.state(LEVEL) == expected
    low, high = verdict.estimate.interval()
    assert (expected == "supported") == (-margin < low and high < margin)
    assert (expected == "contradicted") == (low > margin or high < -margin)


def test_reason_for_an_open_equality_names_the_margin():
    """1-D and 2-D positions on Fashion-MNIST: the interval excludes zero and crosses one point."""
    verdict = Verdict("C20", "trained", Estimate(-0.0135, 0.0035, 35, image_error=0.0019), margin=0.01)
    text = lab_report._undecided_reason(digits_lab(), verdict, LEVEL).text("en")
    assert text.startswith("The interval excludes zero and crosses the margin of ±1.0 points: there is a difference,")
    assert text.endswith("times as many seeds and test images would decide.")
    level = Verdict("C20", "trained", Estimate(-0.004, 0.0035, 35), margin=0.01)
    assert "excludes zero" not in lab_report._undecided_reason(digits_lab(), level, LEVEL).text("en")


# Holm's correction


def test_report_applies_holms_correction(tmp_path):
    """One claim at p = 0.04 is supported, two are not after Holm's correction."""

    class Claims(Question):
        def verdicts(self):
            yield from (Verdict(claim, "trained", Estimate(0.01, error, math.inf)) for claim, error in self.errors)

    Claims.messages = {name: {"en": name, "ko": name} for name in ("title", "about", "C1", "C1-rule", "C2", "C2-rule")}
    question = Claims("claims", digits_lab())
    error_at_004 = 0.01 / stats.norm.isf(0.02)
    for errors, expected in (
        ([("C1", error_at_004)], ["supported"]),
        ([("C1", error_at_004), ("C2", error_at_004)], ["cannot tell", "cannot tell"]),
        ([("C1", error_at_004), ("C2", error_at_004 / 10)], ["supported", "supported"]),
    ):
        question.errors = errors
        document = lab_report.write_report(tmp_path, question.lab, {"claims": question}, machines={}, commands=[])
        assert [claim["verdict"] for claim in document["claims"]] == expected
        assert all((claim["interval"][0] > 0) == (claim["verdict"] == "supported") for claim in document["claims"])
