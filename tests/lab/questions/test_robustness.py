"""The robustness question: numbers from invented results, and an exact invariance."""

import numpy as np
import pytest

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from vitrail.bundles.bundle import Bundle, save
from vitrail.lab.exact import redraw
from vitrail.lab.perturbations import curve_points
from vitrail.lab.questions.robustness import RobustnessQuestion, _perturbations, measure
from vitrail.lab.trial import pack, unpack
from vitrail.models.create import build

LAB = digits_lab()


def test_numbers_follow_the_results(tmp_path):
    def result_of(trial):
        share = {"vit": 0.4}.get(trial.family, 0.7)
        right = {name: pack(np.arange(1000) < 1000 * share) for name in _perturbations(LAB.images)}
        return {"count": 1000, "right": {"": pack(np.ones(1000)), **right}}, {}

    question = RobustnessQuestion("robustness", LAB)
    assert states_with_results(question, tmp_path, lambda _: 0.8, measure=result_of) == {}
    numbers = question.numbers()
    assert numbers["shuffle 4"]["vit"][0] == pytest.approx(0.4)
    assert numbers["low 0.25"]["mlp"][0] == pytest.approx(0.7)
    assert numbers["unchanged"]["resnet"][0] == pytest.approx(1)
    assert set(dict(question.figures())) == {f"robustness-{kind}" for kind in ("shuffle", "drop", "low", "high")}


def test_verdicts_without_results_are_not_run(tmp_path):
    assert states_without_results(RobustnessQuestion("robustness", LAB), tmp_path) == {}


def test_curve_points_include_the_unperturbed_image():
    names = ["shuffle 2", "drop 0.25", "drop 0.5", "low 0.25", "high 0.25"]
    assert curve_points("shuffle", names) == [(1, ""), (2, "shuffle 2")]
    assert curve_points("drop", names) == [(0, ""), (25, "drop 0.25"), (50, "drop 0.5")]
    assert curve_points("low", names) == [(25, "low 0.25"), (100, "")]
    assert curve_points("high", names) == [(0, ""), (25, "high 0.25")]


def test_vit_without_positions_is_invariant_to_shuffled_patches(tmp_path):
    """Shuffled patches do not change the predictions of a ViT without positions. Smaller blocks cut its patches."""
    model = redraw(build(LAB.images.matched_config("vit", position="none")), std=0.6)
    save(Bundle(model=model, preprocess=LAB.images.preprocess), tmp_path / "bundle")
    result = measure({}, LAB.images, [tmp_path / "bundle"], tmp_path).result
    right = {name: unpack(packed, result["count"]) for name, packed in result["right"].items()}
    assert 0 < result["accuracy"] < 1
    assert (right["shuffle 4"] == right[""]).all()
    assert (right["shuffle 2"] == right[""]).all()
    assert (right["shuffle 8"] != right[""]).any()
