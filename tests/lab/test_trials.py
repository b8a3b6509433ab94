"""Trials with special needs: timed alone, other batch sizes, evaluated on parts of the images."""

import dataclasses

import numpy as np
import pytest

from tests.fake_lab import digits_lab, states_without_results
from vitrail.lab import compare
from vitrail.lab.plan import make_plan
from vitrail.lab.question import Accuracies, Question
from vitrail.lab.registry import QUESTIONS
from vitrail.lab.training import shift_augmentation, train
from vitrail.lab.trial import Trial, pack
from vitrail.lab.trial_results import Results, needs_rate


class Timed(Question):
    """Two trials that may run in parallel, and two that may not."""

    def rounds(self):
        return (
            [Trial("m:f", {"number": number}, work=10.0) for number in range(2)],
            [Trial("m:f", {"number": number}, work=10.0, alone=True) for number in (2, 3)],
        )


def test_timings_run_one_at_a_time_after_all_other_trials(tmp_path, monkeypatch):
    results = Results(tmp_path / "results.jsonl", "images")
    ran = []

    def run(_folder, trials, *, jobs, backend):
        for trial in trials:
            ran.append((trial.settings["number"], jobs))
            yield {"key": trial.trial_id("images"), "cell": trial.to_json(), "result": {}, "measured": {}}

    monkeypatch.setattr(compare, "run_trials", run)
    question = Timed("timed", digits_lab())
    trials = [trial for question_round in reversed(question.rounds()) for trial in question_round]
    compare._run_stages(tmp_path, results, lambda: trials, {"vit": 1.0}, jobs=4, backend="loky", tell=lambda _: None)
    assert ran == [(0, 4), (1, 4), (2, 1), (3, 1)]
    empty = Results(tmp_path / "nothing.jsonl", "images")
    plan = make_plan({"timed": question}, empty, {"vit": 1.0}, budget=None, jobs=4)
    assert plan.seconds == pytest.approx(20 / 4 + 20, rel=0.1)


def test_trial_id_does_not_depend_on_running_alone():
    trial = Trial("m:f", {"number": 1})
    assert dataclasses.replace(trial, alone=True).trial_id("images") == trial.trial_id("images")


def test_by_part_estimates_each_part_with_its_own_noise(tmp_path):
    results = Results(tmp_path / "results.jsonl", "images")
    trials = [Trial("m:f", {"seed": seed}) for seed in range(2)]
    for trial, right in zip(trials, ([1, 1, 0, 0], [1, 0, 0, 0]), strict=True):
        result = {"right": pack(np.array(right)), "count": 4}
        results.add({"key": trial.trial_id("images"), "cell": trial.to_json(), "result": result, "measured": {}})
    accuracies = Accuracies(results, {"one": trials})
    assert len(accuracies.right["one"]) == 2  # by_part must not reuse these cached predictions
    parts = accuracies.by_part(
        {"left": np.array([True, True, False, False]), "right": np.array([False, False, True, True])}
    )
    left, right = (parts.estimate(("one", part)) for part in ("left", "right"))
    assert (left.value, left.freedom, left.seed_variance) == (0.75, 1, pytest.approx(0.125 / 2))
    assert (right.value, right.error) == (0, 0)


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
        trials = [trial for question_round in question.rounds() for trial in question_round]
        trained = {part.family for trial in trials for part in (trial, *trial.inputs) if needs_rate(part)}
        assert trained == set(families) - {"mlp"}
        verdicts = states_without_results(question, tmp_path)
        assert set(verdicts.values()) <= {"not run", "reported"}
