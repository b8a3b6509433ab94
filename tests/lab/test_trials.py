"""Trials with special needs: timed alone, other batch sizes, evaluated on parts of the images."""

import dataclasses
import math

import numpy as np
import pytest

from tests.fake_lab import digits_lab, states_without_results
from vitrail.lab import compare
from vitrail.lab.plan import make_plan
from vitrail.lab.question import Accuracies, Question
from vitrail.lab.registry import QUESTIONS
from vitrail.lab.statistics import SeedNoise, combine, contrast, difference
from vitrail.lab.training import shift_augmentation, train
from vitrail.lab.trial import Trial
from vitrail.lab.trial_results import Results


class Timed(Question):
    """Two trials that may run in parallel, and two that may not."""

    def rounds(self):
        return (
            [Trial("m:f", {"number": number}, work=10.0) for number in range(2)],
            [Trial("m:f", {"number": number}, work=10.0, alone=True) for number in (2, 3)],
        )


def test_timings_run_one_at_a_time_after_all_other_trials(tmp_path, monkeypatch):
    results = Results(tmp_path / "results.jsonl", "images", 100)
    ran = []

    def run(_folder, trials, *, jobs, backend):
        for trial in trials:
            ran.append((trial.settings["number"], jobs))
            yield {"key": trial.trial_id("images"), "cell": trial.to_json(), "result": {}, "measured": {}}

    monkeypatch.setattr(compare, "run_trials", run)
    question = Timed("timed", digits_lab())
    trials = [trial for question_round in reversed(question.rounds()) for trial in question_round]
    compare._run_stages(tmp_path, results, trials, {"vit": 1.0}, jobs=4, backend="loky", tell=lambda _: None)
    assert ran == [(0, 4), (1, 4), (2, 1), (3, 1)]
    empty = Results(tmp_path / "nothing.jsonl", "images", 100)
    plan = make_plan({"timed": question}, empty, {"vit": 1.0}, budget=None, jobs=4)
    assert plan.seconds == pytest.approx(20 / 4 + 20, rel=0.1)


def test_trial_id_does_not_depend_on_running_alone():
    trial = Trial("m:f", {"number": 1})
    assert dataclasses.replace(trial, alone=True).trial_id("images") == trial.trial_id("images")


def test_rate_trials_use_the_smallest_size_or_the_task_itself(tmp_path):
    results = Results(tmp_path / "results.jsonl", "images", 100)
    without_size = results.rate_trials(Trial("m:f", {"seed": 3, "learning_rate": None}))
    assert [trial.settings for trial in without_size] == [
        {"seed": 0, "learning_rate": rate} for rate in (3e-4, 1e-3, 3e-3)
    ]
    with_size = results.rate_trials(digits_lab().train("vit", count=300, seed=1))
    assert {trial.settings["count"] for trial in with_size} == {100}


def test_further_rate_is_chosen_only_if_clearly_better(tmp_path):
    results, trial = Results(tmp_path / "results.jsonl", "images", 100), digits_lab().train("vit", count=300, seed=1)

    def put(rate_trial, share):
        result = {"validation_accuracy": share}
        results.add(
            {"key": rate_trial.trial_id("images"), "cell": rate_trial.to_json(), "result": result, "measured": {}}
        )

    for rate_trial, share in zip(results.rate_trials(trial), (0.5, 0.6, 0.7), strict=True):
        assert results.next_rate_trial(trial) is None
        put(rate_trial, share)
    first = results.next_rate_trial(trial)
    assert first.settings == results.rate_trials(trial)[2].settings | {"learning_rate": 1e-2}
    for share, rate in ((0.6, 3e-3), (0.72, 3e-3), (0.74, 1e-2)):  # 2 standard errors are 2.9 points
        put(first, share)
        assert results.rate(trial) == rate
        assert not results.is_cut_off(trial)
    second = results.next_rate_trial(trial)
    assert second.settings == first.settings | {"learning_rate": 3e-2}
    for share, rate, is_cut_off in ((0.75, 1e-2, False), (0.78, 3e-2, True)):
        put(second, share)
        assert (results.rate(trial), results.next_rate_trial(trial)) == (rate, None)
        assert results.is_cut_off(trial) is is_cut_off
        assert results.is_cut_off(Trial("m:look", {}, inputs=(trial,))) is is_cut_off
    put(results.rate_trials(trial)[1], 0.8)
    assert (results.rate(trial), results.next_rate_trial(trial)) == (1e-3, None)
    assert not results.is_cut_off(trial)
    put(results.rate_trials(trial)[0], 0.9)
    assert results.next_rate_trial(trial).settings["learning_rate"] == 1e-4


def test_contrast_of_two_equals_their_difference_and_pairs_images():
    generator = np.random.default_rng(0)
    ease = generator.normal(0, 1, 2000)
    groups = [np.stack([ease + generator.normal(0, 0.5, 2000) > cut for _ in range(2)]) for cut in (-1, -0.9, 0, 0.1)]
    a, b, c, d = (group.astype(float) for group in groups)
    noise = SeedNoise(1e-6, 4)
    assert contrast([(1.0, a, noise), (-1.0, b, noise)]) == difference(a, b, noise)
    joint = contrast([(1.0, a, noise), (-1.0, b, noise), (-1.0, c, noise), (1.0, d, noise)])
    separate = combine((1.0, difference(a, b, noise)), (-1.0, difference(c, d, noise)))
    assert joint.value == pytest.approx(separate.value)
    assert joint.error == pytest.approx(separate.error, rel=0.1)
    assert math.isnan(difference(a, b, SeedNoise(math.nan, 0)).error)


def test_by_part_estimates_each_part_with_its_own_noise(tmp_path):
    accuracies = Accuracies(Results(tmp_path / "results.jsonl", "images", 100), {})
    accuracies.right = {"one": np.array([[1, 1, 0, 0], [1, 0, 0, 0]])}
    assert accuracies.noise_of("one").freedom == 1  # by_part must not reuse this cached noise
    parts = accuracies.by_part(
        {"left": np.array([True, True, False, False]), "right": np.array([False, False, True, True])}
    )
    assert parts.estimate(("one", "left")).value == 0.75
    assert parts.estimate(("one", "right")).value == 0
    assert [parts.noise_of(("one", part)).freedom for part in ("left", "right")] == [1, 1]
    assert parts.noise_of(("one", "left")).variance == 0.125  # of 1 and 0.5; on the right, both seeds have 0
    assert parts.noise_of(("one", "right")).variance == 0


def test_large_training_sets_use_one_seed_less():
    lab = digits_lab(seeds=3)
    assert [len(lab.seeds_for(count)) for count in (300, 10_000, 10_001, 58_000)] == [3, 3, 2, 2]
    assert len(dataclasses.replace(lab, seeds=1).seeds_for(58_000)) == 1


def test_small_batches_train_for_more_steps(tmp_path):
    lab = digits_lab()
    trial = lab.train("mlp", count=100, seed=0, seen=64, recipe={"batch": 4}).clone_with(learning_rate=1e-3)
    result = train(trial.settings, lab.images, [], tmp_path / "one").result
    assert result["curve"][-1][0] == 16


def test_shift_augmentation_scales_with_the_resolution():
    assert [shift_augmentation((side, side))["padding"] for side in (8, 28, 32)] == [1, 2, 2]


@pytest.mark.parametrize("name", ["augmentation", "size", "range", "encoder", "compute"])
def test_only_selected_families_are_trained(tmp_path, name):
    for families in (("mlp",), ("vit", "mlp")):
        question = QUESTIONS[name](name, dataclasses.replace(digits_lab(), families=families))
        trained = {trial.family for question_round in question.rounds() for trial in question_round}
        assert trained == set(families) - {"mlp"}
        verdicts = states_without_results(question, tmp_path)
        assert set(verdicts.values()) <= {"cannot tell", "reported"}
