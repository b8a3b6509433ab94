"""The question of neighbourhood: what weights can follow is proved, what it costs the others decides."""

import numpy as np
import pytest

from tests.made_up import Filled, states
from vitrail.data.sources.registry import open_data
from vitrail.lab.images import prepare
from vitrail.lab.page import write_report
from vitrail.lab.permute import LEVELS
from vitrail.lab.question import Lab
from vitrail.lab.questions.neighbourhood import Neighbourhood, prove
from vitrail.lab.results import Results

FAMILIES = ("vit", "hybrid", "resnet", "mixer", "lstm", "mlp")
LAB = Lab(prepare(open_data("digits")), FAMILIES, (300, 1240), 3, 256)

FOLLOWED = {
    "vit": {"within", "patches"},
    "vit sincos-2d": {"within"},
    "hybrid": set(),
    "resnet": set(),
    "mixer": {"within", "patches"},
    "lstm": {"within"},
    "mlp": set(LEVELS),
}
"""The table of exact invariances."""


@pytest.fixture(scope="module")
def proved():
    return prove(Neighbourhood("neighbourhood", LAB).proof.settings, LAB.images, [], None).result


def test_the_proof_is_the_table_of_exact_invariances(proved):
    for name, levels in proved["families"].items():
        assert {level for level, one in levels.items() if one["after"] is not None} == FOLLOWED[name]
        for one in levels.values():
            assert one["before"] > 0.01
            if one["after"] is not None:
                assert one["after"] < 1e-9
                assert one["training"] < 1e-6
    assert proved["tokens"] == {"within": True, "patches": True, "pixels": False}
    assert proved["resized"]["mirrored"] < 1e-4
    assert proved["resized"]["shuffled"] > 0.01


def test_what_is_proved_is_not_trained(tmp_path):
    question = Neighbourhood("neighbourhood", LAB)
    trained = {name: {level for one, level in question.cells if one == name} - {""} for name in FOLLOWED}
    assert trained == {name: set(LEVELS) - levels for name, levels in FOLLOWED.items()}
    permuted = question.cells["resnet", "pixels"]
    assert [cell.settings["permutation"] for cell in permuted] == [["pixels", (2, 2), seed] for seed in range(3)]
    results = Results(tmp_path / "none.jsonl", "x", 300)
    trials = {trial.key("") for cell in permuted for trial in results.trials(cell)}
    assert len(trials) == 3  # one permutation decides the learning rate of all


def fill(folder, proved, lost):
    """Every family names nine of ten rightly, and loses some skill under permutations of patches."""
    question = Neighbourhood("neighbourhood", LAB)
    filled = Filled(folder, question)
    filled.put(question.proof, **proved)
    for (name, level), cells in question.cells.items():
        for cell in cells:
            filled.train(cell, 0.9 - 0.8 * (lost.get(name, 0.1) if level else 0))
    return question, filled


def test_numbers_decide(tmp_path, proved):
    question, filled = fill(tmp_path, proved, {"resnet": 0.5})
    assert states(question, filled) == {
        "C13": "true",
        "C14": "supported",
        "C34a": "true",
        "C36": "true",
        "P2": "supported",
    }
    assert question.loss("resnet", "patches").value == pytest.approx(0.5, abs=0.01)
    assert question.loss("vit", "patches")[:3] == (0, 0, np.inf)
    assert question.loss("vit", "pixels").value == pytest.approx(0.1, abs=0.01)


def test_other_numbers_decide_otherwise(tmp_path, proved):
    question, filled = fill(tmp_path, proved, {"resnet": -0.1})
    assert states(question, filled)["C14"] == "contradicted"
    families = {
        name: {level: {"before": 1.0, "after": None, "training": None} for level in LEVELS} for name in FOLLOWED
    }
    filled.put(question.proof, families=families, tokens=proved["tokens"], resized=proved["resized"])
    assert states(question, filled) == {
        "C13": "false",
        "C14": "cannot tell",
        "C34a": "false",
        "C36": "false",
        "P2": "contradicted",
    }


def test_missing_cells_cannot_tell_and_a_page_is_written(tmp_path, proved):
    question = Neighbourhood("neighbourhood", LAB)
    question.read(Results(tmp_path / "none.jsonl", "x", 300))
    assert {one.state(0.05) for one in question.verdicts()} == {"cannot tell"}
    assert dict(question.figures()) == {}
    question, filled = fill(tmp_path, proved, {"resnet": 0.5})
    question.read(filled.results)
    found = write_report(tmp_path, LAB, {"neighbourhood": question}, machines={}, commands=[])
    assert found["numbers"]["neighbourhood"]["loss"]["mlp pixels"] == [0.0, 0.0, 0.0]
    assert (tmp_path / "figures" / "neighbourhood-pixels.svg").exists()


def test_a_report_of_the_first_rounds_alone_is_written(tmp_path):
    """One level was run, and not yet the proof: the others have no figure."""
    question = Neighbourhood("neighbourhood", LAB)
    filled = Filled(tmp_path, question)
    for level in ("", "patches"):
        for cell in question.cells["resnet", level][:2]:
            filled.train(cell, 0.9 if not level else 0.5)
    question.read(filled.results)
    write_report(tmp_path, LAB, {"neighbourhood": question}, machines={}, commands=[])
    names = {path.name for path in (tmp_path / "figures").glob("neighbourhood-*")}
    assert names == {"neighbourhood-patches.svg", "neighbourhood-patches.ko.svg"}


def test_rounds_hold_both_sides_of_a_contrast():
    question = Neighbourhood("neighbourhood", LAB)
    proof, first = question.rounds()[:2]
    assert proof == [question.proof]  # what is proved fits every budget
    permuted = [cell.settings["permutation"] is not None for cell in first]
    assert permuted == [False, False, True, True]
    everything = {cell.key("") for cells in question.cells.values() for cell in cells}
    assert everything <= {cell.key("") for cell in question.rounds()[-1]}
