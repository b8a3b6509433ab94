"""Local, strided and global attention at equal training time."""

import dataclasses

import numpy as np
import pytest

from tests.fake_lab import digits_lab, verdict_states
from tests.made_up import InventedResults
from vitrail.lab.questions.cost import CostQuestion
from vitrail.lab.questions.cost_attention import GRIDS, PATTERNS
from vitrail.lab.training import read_config


def make_question(size="Pico", side=8):
    """Return the cost question for images of a size. Only their shape and labels are used."""
    lab = digits_lab(seeds=3)
    test = dataclasses.replace(lab.images.test, images=np.zeros((10, side, side, 1 if side < 32 else 3), np.uint8))
    images = dataclasses.replace(lab.images, size=size, test=test)
    return CostQuestion("cost", dataclasses.replace(lab, images=images))


@pytest.mark.parametrize(("local", "verdict"), [(0.8, "supported"), (0.6, "contradicted"), (0.7, "cannot tell")])
def test_local_attention_is_compared_with_global_attention_on_the_first_grid(tmp_path, local, verdict):
    question = make_question("Nano", 28)
    invented = InventedResults(tmp_path, question)
    for (index, pattern), trials in question.patterns.trials.items():
        for trial in trials:
            invented.train(trial, local if (index, pattern) == (0, "local") else 0.7)
    question.read(invented.results)
    assert verdict_states(question)["C42"] == verdict
    (fields,) = (verdict.fields for verdict in question.verdicts() if verdict.claim == "C42")
    assert (fields["tokens"], fields["more"]) == (196, 784)
    assert "strided" in question.html({})
    assert question.numbers()["patterns"]["196 local"]["accuracy"][0] == pytest.approx(local, abs=0.01)


def test_training_times_are_those_of_one_machine(tmp_path):
    question = make_question()
    comparison = question.patterns
    invented = InventedResults(tmp_path, question)
    seconds = {"global": 2.0, "local": 3.0, "strided": 4.0}
    for (_, pattern), trials in comparison.trials.items():
        for trial, machine in zip(trials, ("this", "this", "slow"), strict=True):
            invented.train(trial, 0.7)
            resolved = invented.results.resolve(trial)
            record = {"cell": resolved.to_json(), "result": invented.predictions(0.7), "key": resolved.trial_id("x")}
            measured = {"seconds": seconds[pattern] * (10 if machine == "slow" else 1)}
            invented.results.add(record | {"measured": measured, "machine": machine})
    question.read(invented.results)
    seen = comparison.trials[0, "local"][0].settings["seen"]
    assert comparison.seconds[0, "local"] == pytest.approx(1000 * 3.0 / seen)
    assert comparison.verdict().fields["time"] == "1.50"


def test_larger_grid_is_optional(tmp_path):
    question = make_question("Nano", 28)
    invented = InventedResults(tmp_path, question)
    for (index, _), trials in question.patterns.trials.items():
        for trial in trials if index == 0 else ():
            invented.train(trial, 0.7)
    question.read(invented.results)
    assert verdict_states(question)["C42"] == "cannot tell"
    (verdict,) = (verdict for verdict in question.verdicts() if verdict.claim == "C42")
    assert (verdict.message, "more" in verdict.fields) == ("result", False)


@pytest.mark.parametrize(("size", "side"), [("Pico", 8), ("Nano", 28), ("Nano/8", 32)])
def test_models_differ_in_width_and_attention_only(size, side):
    question = make_question(size, side)
    trials = question.patterns.trials
    assert len(trials) == len(PATTERNS) * len(GRIDS[size])
    configs = {key: read_config(group[0].settings) for key, group in trials.items()}
    for (index, pattern), config in configs.items():
        assert config.attention == pattern
        assert config.patches == question.patterns.tokens(index)
        reference = configs[index, "global"]
        same = config.replace(width=reference.width, mlp=reference.mlp, attention="global")
        assert same == reference
        assert config.width >= reference.width


def test_last_rounds_train_every_grid():
    question = make_question("Nano", 28)
    rounds = question.rounds()
    ids = {trial.trial_id("") for question_round in rounds for trial in question_round}
    first_grid = [trial for (index, _), trials in question.patterns.trials.items() if index == 0 for trial in trials]
    assert {trial.trial_id("") for trial in first_grid} <= ids
    assert len(rounds[3]) == 2 * 3
