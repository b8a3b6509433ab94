"""The neighbourhood question: proofs of invariances, and verdicts from invented losses."""

import numpy as np
import pytest

from tests.made_up import InventedResults, states
from vitrail.data.sources.registry import open_data
from vitrail.lab.images import prepare
from vitrail.lab.lab_report import write_report
from vitrail.lab.permute import LEVELS
from vitrail.lab.question import Lab
from vitrail.lab.questions.neighbourhood import NeighbourhoodQuestion, prove
from vitrail.lab.trial_results import Results

FAMILIES = ("vit", "hybrid", "resnet", "mixer", "lstm", "mlp")
LAB = Lab(prepare(open_data("digits")), FAMILIES, (300, 1240), 3, 256)

EXACT_LEVELS = {
    "vit": {"within", "patches"},
    "vit sincos-2d": {"within"},
    "hybrid": set(),
    "resnet": set(),
    "mixer": {"within", "patches"},
    "lstm": {"within"},
    "mlp": set(LEVELS),
}
"""Levels of permutation that each variant's weights can undo exactly."""


@pytest.fixture(scope="module")
def proved():
    return prove(NeighbourhoodQuestion("neighbourhood", LAB).proof_trial.settings, LAB.images, [], None).result


def test_proof_matches_the_table_of_exact_invariances(proved):
    for name, levels in proved["families"].items():
        assert {level for level, change in levels.items() if change["after"] is not None} == EXACT_LEVELS[name]
        for change in levels.values():
            assert change["before"] > 0.01
            if change["after"] is not None:
                assert change["after"] < 1e-9
                assert change["training"] < 1e-6
    assert proved["tokens"] == {"within": True, "patches": True, "pixels": False}
    assert proved["resized"]["mirrored"] < 1e-4
    assert proved["resized"]["shuffled"] > 0.01


def test_proved_levels_are_not_trained(tmp_path):
    question = NeighbourhoodQuestion("neighbourhood", LAB)
    trained = {name: {level for variant, level in question.trials if variant == name} - {""} for name in EXACT_LEVELS}
    assert trained == {name: set(LEVELS) - levels for name, levels in EXACT_LEVELS.items()}
    permuted = question.trials["resnet", "pixels"]
    assert [trial.settings["permutation"] for trial in permuted] == [["pixels", (2, 2), seed] for seed in range(3)]
    results = Results(tmp_path / "none.jsonl", "x")
    rate_trials = {rate_trial.trial_id("") for trial in permuted for rate_trial in results.rate_trials(trial)}
    assert len(rate_trials) == 9  # three permutations choose the learning rate for all


def invent(folder, proved, lost):
    """Write results: every family has 90 % accuracy and loses the given share of skill under permutations."""
    question = NeighbourhoodQuestion("neighbourhood", LAB)
    invented = InventedResults(folder, question)
    invented.put(question.proof_trial, **proved)
    for (name, level), trials in question.trials.items():
        for trial in trials:
            invented.train(trial, 0.9 - 0.8 * (lost.get(name, 0.1) if level else 0))
    return question, invented


def test_verdicts_hold_for_numbers_in_favour(tmp_path, proved):
    question, invented = invent(tmp_path, proved, {"resnet": 0.5})
    assert states(question, invented) == {
        "C13": "true",
        "C14": "supported",
        "C34a": "true",
        "C36": "true",
        "P2": "supported",
    }
    assert question.loss("resnet", "patches").value == pytest.approx(0.5, abs=0.01)
    assert question.loss("vit", "patches")[:3] == (0, 0, np.inf)
    assert question.loss("vit", "pixels").value == pytest.approx(0.1, abs=0.01)


def test_verdicts_fail_for_numbers_against(tmp_path, proved):
    question, invented = invent(tmp_path, proved, {"resnet": -0.1})
    assert states(question, invented)["C14"] == "contradicted"
    families = {
        name: {level: {"before": 1.0, "after": None, "training": None} for level in LEVELS} for name in EXACT_LEVELS
    }
    invented.put(question.proof_trial, families=families, tokens=proved["tokens"], resized=proved["resized"])
    assert states(question, invented) == {
        "C13": "false",
        "C14": "not run",
        "C34a": "false",
        "C36": "false",
        "P2": "contradicted",
    }


def test_missing_trials_are_not_run_and_report_is_written(tmp_path, proved):
    question = NeighbourhoodQuestion("neighbourhood", LAB)
    question.read(Results(tmp_path / "none.jsonl", "x"))
    assert {verdict.state(0.05) for verdict in question.verdicts()} == {"not run"}
    assert dict(question.figures()) == {}
    question, invented = invent(tmp_path, proved, {"resnet": 0.5})
    question.read(invented.results)
    claims = write_report(tmp_path, LAB, {"neighbourhood": question}, machines={}, commands=[])
    assert claims["numbers"]["neighbourhood"]["loss"]["mlp pixels"] == [0.0, 0.0, 0.0]
    assert (tmp_path / "figures" / "neighbourhood-pixels.svg").exists()


def test_report_of_the_first_rounds_is_written(tmp_path):
    """Only one level was run, without the proof: other levels have no figure."""
    question = NeighbourhoodQuestion("neighbourhood", LAB)
    invented = InventedResults(tmp_path, question)
    for level in ("", "patches"):
        for trial in question.trials["resnet", level][:2]:
            invented.train(trial, 0.9 if not level else 0.5)
    question.read(invented.results)
    write_report(tmp_path, LAB, {"neighbourhood": question}, machines={}, commands=[])
    names = {path.name for path in (tmp_path / "figures").glob("neighbourhood-*")}
    assert names == {"neighbourhood-patches.svg", "neighbourhood-patches.ko.svg"}


def test_each_round_holds_both_sides_of_a_contrast():
    question = NeighbourhoodQuestion("neighbourhood", LAB)
    proof, first = question.rounds()[:2]
    assert proof == [question.proof_trial]  # the proof fits every budget
    permuted = [trial.settings["permutation"] is not None for trial in first]
    assert permuted == [False] * 3 + [True] * 3
    trial_ids = {trial.trial_id("") for trials in question.trials.values() for trial in trials}
    assert trial_ids <= {trial.trial_id("") for trial in question.rounds()[-1]}
