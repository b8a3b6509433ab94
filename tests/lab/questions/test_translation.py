"""The question of translation: verdicts follow the numbers, and what is exact is proved."""

import numpy as np
import pytest

from tests.fake_lab import answer, digits_lab, nothing
from vitrail.bundles.bundle import Bundle, save
from vitrail.lab.exact import redraw
from vitrail.lab.measurements import looking_cell
from vitrail.lab.perturbations import shift_changes, shifts
from vitrail.lab.questions.translation import Translation, measure, prove
from vitrail.lab.training import read_config
from vitrail.lab.trial import pack
from vitrail.models.create import build

LAB = digits_lab()


@pytest.fixture(scope="module")
def proved():
    return prove({}, LAB.images, [], None).result


def finds(proved, consistency):
    """What cells find if the answers of each family stay so often."""
    names = list(shift_changes(shifts(8)))

    def find(cell):
        if cell.task.endswith("prove"):
            return proved, {}
        errors = {"blocks.0": {"1": [0.2, 0.3]}, "pooled": {"1": [0.1, 0.2], "2": [0.3, 0.4]}}
        if not cell.of:
            return {"errors": errors}, {}
        share = consistency[cell.family]
        right = np.arange(1000) < 900
        seed = cell.of[0].settings["seed"]
        same = np.random.default_rng(seed).permutation(np.arange(1000) < 1000 * share)
        # An answer that stays is wrong here: what decides is whether it stays, not whether it is right.
        asked = {name: {"right": pack(right & ~same), "same": pack(same)} for name in names}
        return {"errors": errors, "count": 1000, "right": pack(right), "accuracy": 0.9, "asked": asked}, {}

    return find


@pytest.mark.parametrize(("cnn", "verdict"), [(0.9, "supported"), (0.5, "contradicted"), (0.703, "cannot tell")])
def test_verdicts_follow_the_numbers(tmp_path, proved, cnn, verdict):
    question = Translation("translation", LAB)
    shares = dict.fromkeys(LAB.families, 0.7) | {"resnet": cnn}
    found = answer(question, tmp_path, lambda _: 0.8, finds=finds(proved, shares))
    assert found == {"C11": verdict, "C12b": "false"}
    largest = LAB.sizes[-1]
    assert question.consistency[None].estimate(("resnet", largest)).value == pytest.approx(cnn, abs=0.02)
    assert question.numbers()["errors"][f"vit trained {largest} pooled 2"] == pytest.approx(0.35)


def test_without_results_nothing_is_said(tmp_path):
    assert nothing(Translation("translation", LAB), tmp_path) == {"C11": "cannot tell", "C12b": "cannot tell"}


def test_what_is_exact(proved):
    zero = {"cnn", "cnn-stride-4", "embedding", "mlp", "norm", "attention", "block"}
    assert {name for name, value in proved.items() if value < 1e-9} == zero
    assert all(value > 1e-2 for name, value in proved.items() if name not in zero)


def test_a_real_model_is_measured_the_same_twice(tmp_path):
    cell = LAB.train("vit", count=100, seed=0)
    model = redraw(build(read_config(cell.settings)))
    save(Bundle(model=model, preprocess=LAB.images.preprocess), tmp_path / "bundle")
    found = [measure({}, LAB.images, [tmp_path / "bundle"], tmp_path).result for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["count"] == 360
    assert set(found[0]["errors"]) == {*(f"blocks.{layer}" for layer in range(4)), "pooled"}
    untrained = looking_cell("x", cell, 1, untrained=True)
    before = measure(untrained.settings, LAB.images, [], tmp_path).result
    assert set(before) == {"errors"}
