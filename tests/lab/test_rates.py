"""The choice of learning rates, and verdicts that depend on it."""

import dataclasses

import numpy as np
import pytest

from tests.fake_lab import digits_lab
from vitrail.lab import trial_results
from vitrail.lab.question import Accuracies, Verdict
from vitrail.lab.rates import RateChoice, choose_rate, rate_trial
from vitrail.lab.training import FIRST_RATES, RATE_SEEDS, RATES
from vitrail.lab.trial import Trial, compare_variants, pack
from vitrail.lab.trial_results import Results

IMAGES = 1000
LEVEL = 0.05


class Trainings:
    """Invented results of variants. Validation accuracies of a rate are spread over the three seeds of the choice."""

    def __init__(self, folder, names="ab", seeds=5):
        self.results = Results(folder / "results.jsonl", "x")
        trials = {
            name: [Trial("m:f", {"variant": name, "seed": seed, "learning_rate": None}) for seed in range(seeds)]
            for name in names
        }
        self.trials = compare_variants(trials)
        self.generator = np.random.default_rng(0)

    def predictions(self, share):
        """Return correct predictions for this share of the images, and wrong ones for the last images."""
        right = np.arange(IMAGES) < round(share * IMAGES)
        flipped = self.generator.choice(IMAGES, 4, replace=False)
        right[flipped[:2]], right[flipped[2:]] = True, False
        return pack(right)

    def put(self, trial, test, validation):
        result = {
            "right": self.predictions(test),
            "count": IMAGES,
            "validation_right": pack(np.arange(IMAGES) < round(validation * IMAGES)),
            "validation_count": IMAGES,
        }
        self.results.add({"key": trial.trial_id("x"), "cell": trial.to_json(), "result": result, "measured": {}})

    def try_rates(self, name, validation, test=None, spread=0.0):
        """Add the trials of the choice, with accuracies by rate."""
        for rate, share in validation.items():
            for seed, shift in zip(RATE_SEEDS, (-spread, 0.0, spread), strict=True):
                trial = rate_trial(self.trials[name][0], rate, seed)
                self.put(trial, (test or {}).get(rate, 0.5), share + shift * (1 if rate == min(validation) else -1))

    def train(self, name, accuracies):
        """Add the trials of the verdict. Their accuracy depends on the rate that was chosen."""
        for trial in self.trials[name]:
            resolved = self.results.resolve(trial)
            self.put(resolved, accuracies[resolved.settings["learning_rate"]], 0.5)

    def lead(self):
        return Accuracies(self.results, self.trials).difference("a", "b")


@pytest.fixture
def trainings(tmp_path):
    return Trainings(tmp_path)


def shares(*values, rates=FIRST_RATES):
    return dict(zip(rates, values, strict=True))


# The choice


def test_rate_is_chosen_by_the_mean_of_three_seeds_that_take_no_part_in_verdicts(trainings):
    trial = trainings.trials["a"][2]
    tried = trainings.results.rate_trials(dataclasses.replace(trial, peers=()))
    assert len(RATE_SEEDS) == 3
    assert {(each.settings["learning_rate"], each.settings["seed"]) for each in tried} == {
        (rate, seed) for rate in FIRST_RATES for seed in RATE_SEEDS
    }
    assert not {each.settings["seed"] for trials in trainings.trials.values() for each in trials} & set(RATE_SEEDS)
    for seed, accuracies in zip(RATE_SEEDS, ((0.9, 0.8, 0.5), (0.5, 0.8, 0.5), (0.5, 0.8, 0.5)), strict=True):
        for rate, share in shares(*accuracies).items():
            trainings.put(rate_trial(trial, rate, seed), 0.5, share)
    assert trainings.results.rate(dataclasses.replace(trial, peers=())) == 1e-3  # the first seed alone prefers 3e-4


def test_every_number_of_training_images_has_its_own_choice(tmp_path):
    results = Results(tmp_path / "results.jsonl", "x")
    few, many = (digits_lab().train("vit", count=count, seed=1) for count in (100, 300))
    counts = [{trial.settings["count"] for trial in results.rate_trials(trial)} for trial in (few, many)]
    assert counts == [{100}, {300}]


def test_seeds_of_a_variant_share_one_choice_and_only_the_rate_is_set(trainings):
    trainings.try_rates("a", shares(0.5, 0.6, 0.5))
    trainings.try_rates("b", shares(0.5, 0.6, 0.5))
    first, second = trainings.trials["a"][:2]
    assert trainings.results.rate_trials(first) == trainings.results.rate_trials(second)
    assert trainings.results.resolve(second).settings == {"variant": "a", "seed": 1, "learning_rate": 1e-3}


def test_missing_trial_of_the_choice_leaves_the_rate_open(trainings):
    """Also a missing trial of a peer, because a tie would share its rate."""
    trial = trainings.trials["a"][0]
    trainings.try_rates("a", shares(0.5, 0.6, 0.5))
    assert trainings.results.rate(trial) is None
    assert trainings.results.rate(dataclasses.replace(trial, peers=())) == 1e-3
    for rate, seed in ((rate, seed) for rate in FIRST_RATES for seed in RATE_SEEDS):
        assert trainings.results.rate(trial) is None
        assert trainings.results.resolve(trial) is None
        assert trainings.results.get(trial) is None
        assert trainings.results.plausible_rates(trial) == {}
        trainings.put(rate_trial(trainings.trials["b"][0], rate, seed), 0.5, 0.6 if rate == 1e-3 else 0.5)
    assert trainings.results.rate(trial) == 1e-3


def test_result_that_is_added_changes_the_choice(trainings):
    trial = dataclasses.replace(trainings.trials["a"][0], peers=())
    trainings.try_rates("a", shares(0.5, 0.6, 0.5))
    assert trainings.results.rate(trial) == 1e-3
    trainings.try_rates("a", shares(0.5, 0.6, 0.7))
    assert trainings.results.rate(trial) is None  # 1e-2 could be better
    trainings.try_rates("a", {1e-2: 0.6})
    assert trainings.results.rate(trial) == 3e-3


@pytest.mark.parametrize("sign", [-1, 1])
def test_best_rate_at_an_end_is_extended_up_to_the_outermost_which_is_cut_off(trainings, sign):
    trial = dataclasses.replace(trainings.trials["a"][0], peers=())
    measurement = Trial("m:look", {}, inputs=(trial,))
    trainings.try_rates("a", shares(0.5 - 0.01 * sign, 0.5, 0.5 + 0.01 * sign))
    outer = [rate for rate in RATES[::sign] if rate not in FIRST_RATES and (rate > 1e-3) == (sign > 0)]
    for number, rate in enumerate(outer):
        assert trainings.results.rate(trial) is None
        missing = {each.settings["learning_rate"] for each in trainings.results.rate_trials(trial)} - set(FIRST_RATES)
        assert missing == set(outer[: number + 1])
        trainings.try_rates("a", {rate: 0.6 + 0.01 * number})
    assert trainings.results.rate(trial) == outer[-1] == RATES[::sign][-1]
    assert trainings.results.is_cut_off(trial)
    assert trainings.results.is_cut_off(measurement)
    trainings.try_rates("a", {outer[-1]: 0.55})
    assert trainings.results.rate(trial) == outer[-2]
    assert not trainings.results.is_cut_off(trial)
    assert not trainings.results.is_cut_off(measurement)


def choice(validation, spread=0.0):
    """Return the rates with accuracies that three seeds spread in opposite directions for neighbouring rates."""
    signs = {rate: (-1) ** RATES.index(rate) for rate in validation}
    return RateChoice(
        {
            rate: np.array([[share + signs[rate] * shift] for shift in (-spread, 0.0, spread)])
            for rate, share in validation.items()
        }
    )


def test_ties_share_the_rate_that_is_best_for_the_mean():
    own, other = choice(shares(0.50, 0.80, 0.81), 0.02), choice(shares(0.50, 0.86, 0.80), 0.02)
    assert own.best == 3e-3
    assert own.within(1) == [1e-3, 3e-3]  # the difference of 0.01 has a standard error of 0.04 / sqrt(3)
    assert choose_rate(own, [other]) == choose_rate(other, [own]) == 1e-3
    assert choose_rate(own, []) == 3e-3


def test_clear_differences_and_rates_of_one_variant_are_not_shared():
    own, other = choice(shares(0.50, 0.80, 0.81)), choice(shares(0.50, 0.86, 0.80))
    assert own.within(1) == [3e-3]
    assert (choose_rate(own, [other]), choose_rate(other, [own])) == (3e-3, 1e-3)
    extended = choice(shares(0.5, 0.6, 0.7, 0.69, rates=(*FIRST_RATES, 1e-2)), 0.02)
    assert choose_rate(extended, [other]) == 3e-3  # the other variant was not tried with 1e-2


def test_plausible_rates_are_within_two_standard_errors_and_begin_with_the_chosen_rate():
    spread = 0.02
    error = 2 * spread / 3**0.5  # of the difference of neighbouring rates
    for lag, is_plausible in ((1.9 * error, True), (2.1 * error, False)):
        assert (3e-4 in choice({3e-4: 0.8 - lag, 1e-3: 0.8}, spread).within(2)) == is_plausible


def test_seed_of_the_choice_draws_the_permutation(tmp_path):
    """All permutations of a level share one rate."""
    results = Results(tmp_path / "results.jsonl", "x")
    permuted = [
        digits_lab().train("vit", count=100, seed=seed, permutation=("patches", (2, 2), seed)) for seed in range(3)
    ]
    tried = [results.rate_trials(trial) for trial in permuted]
    assert tried[0] == tried[1] == tried[2]
    assert {(trial.settings["seed"], *trial.settings["permutation"]) for trial in tried[0]} == {
        (seed, "patches", (2, 2), seed) for seed in RATE_SEEDS
    }


# Verdicts that depend on the rate

TUNED, UNTUNED = 0.85, 0.80
"""Test accuracy of a variant at its best rate, and at a tenth of it."""


def add_first_variant(trainings):
    trainings.try_rates("a", shares(0.5, 0.8, 0.5), shares(0.5, TUNED, 0.5))


def assert_is_rate_dependent(trainings):
    lead = trainings.lead()
    verdict = Verdict("C1", "trained", lead)
    assert lead.interval()[0] > 0.03  # the interval alone would decide
    assert (verdict.state(LEVEL), verdict.doubt) == ("cannot tell", "rate-dependent")
    assert lead.rates == (pytest.approx(0.0, abs=0.01), pytest.approx(TUNED - UNTUNED, abs=0.01))


def test_real_effect_without_rate_dependence_is_a_verdict(trainings):
    """The second variant is worse at all rates that may be its best ones, also if they are tied."""
    add_first_variant(trainings)
    test = shares(UNTUNED, UNTUNED, UNTUNED)
    trainings.try_rates("b", shares(0.795, 0.8, 0.5), test, spread=0.02)
    for name, accuracies in (("a", shares(0.5, TUNED, 0.5)), ("b", test)):
        trainings.train(name, accuracies)
    assert len(trainings.results.plausible_rates(trainings.trials["b"][0])) == 2
    verdict = Verdict("C1", "trained", trainings.lead())
    assert (verdict.state(LEVEL), verdict.doubt) == ("supported", None)
    assert verdict.estimate.value == pytest.approx(TUNED - UNTUNED, abs=0.005)


def test_variant_trained_at_a_tenth_of_its_best_rate_is_rate_dependent(trainings, monkeypatch):
    """Whatever rule chose that rate, the best one on validation images is among the plausible ones."""
    add_first_variant(trainings)
    validation = {1e-4: 0.7, 3e-4: 0.75, 1e-3: 0.78, 3e-3: 0.8, 1e-2: 0.5}
    test = {1e-4: 0.5, 3e-4: UNTUNED, 1e-3: 0.82, 3e-3: TUNED, 1e-2: 0.5}
    trainings.try_rates("b", validation, test)
    tenths = {3e-3: 3e-4}
    monkeypatch.setattr(
        trial_results, "choose_rate", lambda own, others: tenths.get(rate := choose_rate(own, others), rate)
    )
    for name, accuracies in (("a", shares(0.5, TUNED, 0.5)), ("b", test)):
        trainings.train(name, accuracies)
    assert trainings.results.rate(trainings.trials["b"][0]) == 3e-4
    assert_is_rate_dependent(trainings)


def test_misleading_validation_images_within_two_errors_are_rate_dependent(trainings):
    """On validation images, a tenth of the rate that is best on test images is better by 1.7 standard errors."""
    add_first_variant(trainings)
    test = {1e-4: UNTUNED, 3e-4: 0.5, 1e-3: TUNED, 3e-3: 0.5, 3e-5: 0.5}
    trainings.try_rates("b", {3e-5: 0.5, 3e-4: 0.77, 3e-3: 0.5}, test)
    trainings.try_rates("b", {1e-4: 0.8, 1e-3: 0.76}, test, spread=0.02)
    assert trainings.results.rate(trainings.trials["b"][0]) == 1e-4
    assert list(trainings.results.plausible_rates(trainings.trials["b"][0])) == [1e-4, 1e-3]
    for name, accuracies in (("a", shares(0.5, TUNED, 0.5)), ("b", test)):
        trainings.train(name, accuracies)
    assert_is_rate_dependent(trainings)


def test_rates_of_parts_and_of_sums_follow_the_terms(trainings):
    add_first_variant(trainings)
    test = shares(UNTUNED, TUNED, 0.5)
    trainings.try_rates("b", shares(0.8, 0.795, 0.5), test, spread=0.02)
    trainings.try_rates("b", {1e-4: 0.5})
    for name, accuracies in (("a", shares(0.5, TUNED, 0.5)), ("b", test)):
        trainings.train(name, accuracies)
    accuracies = Accuracies(trainings.results, trainings.trials)
    low, high = accuracies.estimate("b").rates
    assert high - low == pytest.approx(TUNED - UNTUNED, abs=0.005)
    doubled = accuracies.contrast((2.0, "a"), (-2.0, "b")).rates
    assert doubled[1] - doubled[0] == pytest.approx(2 * (high - low))
    errors = accuracies.log_errors((1.0, "b")).rates
    assert errors == (pytest.approx(np.log(1 - high)), pytest.approx(np.log(1 - low)))
    parts = accuracies.by_part({"first": np.arange(IMAGES) < 700, "last": np.arange(IMAGES) >= 700})
    low, high = parts.estimate(("b", "first")).rates
    assert high - low < 0.01  # the rates differ in the images from 0.8 to 0.85 only
    low, high = parts.estimate(("b", "last")).rates
    assert high - low == pytest.approx((TUNED - UNTUNED) / 0.3, abs=0.02)
