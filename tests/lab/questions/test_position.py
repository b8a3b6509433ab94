"""The position question: properties of encodings against exact values, and verdicts from invented numbers."""

import json
import math
import re

import numpy as np
import pytest

from tests.made_up import InventedResults, states
from vitrail.data.sources.registry import open_data
from vitrail.lab.images import prepare
from vitrail.lab.lab_report import write_report
from vitrail.lab.position_measures import measure_encoding, pairwise_distances
from vitrail.lab.question import Lab, Verdict
from vitrail.lab.questions.position import KINDS, PositionQuestion, prove
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial_results import Results

LAB = Lab(prepare(open_data("digits")), ("vit",), (300, 1240), 3, 256)


# Metrics


def test_sinusoids_are_unique_bounded_and_even_and_random_tables_uneven():
    proof = prove({"model": LAB.images.matched_config("vit").to_document()}, LAB.images, [], None).result
    for values in proof["sinusoids"].values():
        assert values["unique"] > 0.01
        assert values["bounded"] <= 1
        assert values["uneven"] < 1e-12
        assert values["length"] < 1e-12
    random = np.random.default_rng(0).normal(0, 0.02, (49, 64))
    values = measure_encoding(pairwise_distances(random), float(np.abs(random).max()), (7, 7))
    assert values.unique > 0.7
    assert values.uneven > 0.8
    larger = measure_encoding(pairwise_distances(50 * random), float(np.abs(50 * random).max()), (7, 7))
    assert larger == pytest.approx(
        (values.unique, 50 * values.bounded, values.uneven)
    )  # shares do not depend on the scale
    assert max(proof["none"].values()) < 1e-12
    assert set(proof["kinds"]) == set(KINDS) - {"none"}
    assert min(proof["kinds"].values()) > 0.01


def test_repeated_position_is_not_unique():
    line = np.arange(6.0)[:, None]
    even = measure_encoding(pairwise_distances(line), 5.0, (1, 6))
    assert even == pytest.approx((1 / (70 / 30), 5.0, 0.0))
    line[3] = line[2]
    assert measure_encoding(pairwise_distances(line), 5.0, (1, 6)).unique == 0
    assert measure_encoding(np.zeros((6, 6, 1)), 0.0, (1, 6)) == (0.0, 0.0, 0.0)
    by_offset = np.subtract.outer(np.arange(6), np.arange(6))[..., None].repeat(2, 2)
    assert measure_encoding(by_offset, 5.0, (1, 6)).uneven == 0
    assert measure_encoding(by_offset, 5.0, (1, 6)).unique > 0


# Verdicts


@pytest.mark.parametrize(
    ("value", "error", "state"),
    [
        (0.0, 0.001, "supported"),
        (0.02, 0.001, "contradicted"),
        (-0.02, 0.001, "contradicted"),
        (0.0, 0.01, "cannot tell"),
        (0.009, 0.001, "cannot tell"),
        (0.011, 0.001, "cannot tell"),
        (0.0, math.nan, "cannot tell"),
    ],
)
def test_equality_is_supported_only_within_the_margin(value, error, state):
    verdict = Verdict("C20", "trained", Estimate(value, error, 1e9), margin=0.01)
    assert verdict.state(0.05) == state
    low, high = Estimate(value, error, 1e9).interval() if error == error else (0, 0)
    assert (state == "supported") == (-0.01 < low <= high < 0.01 and error == error)


def invent(folder, accuracies, places):
    """Return a question with invented accuracies by variant and [step, row, nearness] of learned positions."""
    question = PositionQuestion("position", LAB)
    invented = InventedResults(folder, question)
    invented.put(question.proof_trial, **prove(question.proof_trial.settings, LAB.images, [], None).result)
    for (name, _), trials in question.trials.items():
        for seed, trial in enumerate(trials):
            curve = [[step, 0.5, row, row, nearness * (1 + 0.01 * seed)] for step, row, nearness in places]
            invented.train(trial, accuracies.get(name, 0.8), places=curve)
    return question, invented


def test_verdicts_hold_for_numbers_in_favour(tmp_path):
    curve = [(0, -0.3, -0.2), (1, -0.2, -0.1), (80, 0.9, 0.7)]
    question, invented = invent(
        tmp_path, {"learned-1d": 0.85, "learned-2d": 0.85, "sincos-2d": 0.8, "none": 0.7}, curve
    )
    verdicts = states(question, invented)
    supported = dict.fromkeys(("C17", "C19", "C20", "P1"), "supported")
    assert verdicts == supported | {"C18": "true", "C21": "true"}
    assert next(question.verdicts()).estimate.value == pytest.approx(0.909)


def test_verdicts_fail_for_numbers_against(tmp_path):
    curve = [(0, 0.5, 0.2), (1, 0.2, 0.1), (80, 0.1, -0.3)]
    question, invented = invent(
        tmp_path, {"learned-1d": 0.8, "learned-2d": 0.85, "sincos-2d": 0.85, "none": 0.83}, curve
    )
    properties = {"unique": 0.0, "bounded": 0.0, "uneven": 1.0, "length": 0.0}
    invented.put(question.proof_trial, none={"cls": 0.1}, kinds={}, sinusoids={"sincos-1d": properties})
    trained = dict.fromkeys(("C17", "C19", "C20", "P1"), "contradicted")
    assert states(question, invented) == trained | {"C18": "false", "C21": "false"}


def test_missing_trials_are_not_run_and_report_is_written(tmp_path):
    question = PositionQuestion("position", LAB)
    question.read(Results(tmp_path / "none.jsonl", "x"))
    assert {verdict.state(0.05) for verdict in question.verdicts()} == {"not run"}
    question, invented = invent(tmp_path, {}, [(0, 0, 0), (1, 0.1, 0.1), (9, 0.5, 0.5)])
    question.read(invented.results)
    document = write_report(tmp_path, LAB, {"position": question}, machines={}, commands=[])
    assert {claim["id"] for claim in document["claims"]} == {"C17", "C18", "C19", "C20", "C21", "P1"}
    english, korean = (
        (tmp_path / "figures" / f"position-structure{ending}.svg").read_text(encoding="utf-8") for ending in ("", ".ko")
    )
    assert ("step<" in english, "스텝" in english) == (True, False)
    assert ("step<" in korean, "스텝" in korean) == (False, True)


def test_vit_trials_are_shared_with_other_questions():
    question = PositionQuestion("position", LAB)
    assert question.trials["learned-1d", 1240][1] == LAB.train("vit", count=1240, seed=1)
    rounds = question.rounds()
    keys = [{trial.trial_id("") for trial in question_round} for question_round in rounds]
    assert all(keys)
    assert {trial.trial_id("") for trials in question.trials.values() for trial in trials} <= keys[-1]


def test_question_without_its_family_trains_nothing():
    lab = Lab(LAB.images, ("mixer",), LAB.sizes, 2, 256)
    question = PositionQuestion("position", lab)
    assert [trial for trials in question.rounds() for trial in trials] == [question.proof_trial]


def test_default_size_is_at_most_ten_thousand():
    for sizes, default_size in (((300, 10_000, 58_000), 10_000), ((300, 1240), 1240), ((20_000, 30_000), 20_000)):
        assert Lab(LAB.images, ("vit",), sizes, 2, 256).default_size == default_size


def test_report_of_one_seed_has_null_errors(tmp_path):
    question = PositionQuestion("position", LAB)
    invented = InventedResults(tmp_path, question)
    for kind in ("none", "learned-1d"):
        invented.train(question.trials[kind, 1240][0], 0.8)
    question.read(invented.results)
    document = write_report(tmp_path, LAB, {"position": question}, machines={}, commands=[])
    value, error = document["numbers"]["position"]["none 1240"]["accuracy"]
    assert (value, error) == (pytest.approx(0.8, abs=0.01), None)
    assert json.loads((tmp_path / "claims.json").read_text()) == document
    assert {claim["verdict"] for claim in document["claims"]} == {"not run"}
    assert "nan" not in re.sub("<.*?>", " ", question.html(dict(question.figures())))
