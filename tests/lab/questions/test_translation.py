"""The translation question: verdicts from invented results, and exact statements."""

import numpy as np
import pytest

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from vitrail.bundles.bundle import Bundle, save
from vitrail.lab.exact import redraw
from vitrail.lab.measurements import measurement_trial
from vitrail.lab.perturbations import shift_distances, shift_perturbations
from vitrail.lab.questions.translation import TranslationQuestion, measure, prove
from vitrail.lab.training import read_config
from vitrail.lab.trial import pack
from vitrail.models.create import build

LAB = digits_lab()


@pytest.fixture(scope="module")
def proved():
    return prove({}, LAB.images, [], None).result


def invent_results(proved, consistency):
    """Return a function that invents the outcome of a trial from consistencies by family."""
    names = list(shift_perturbations(shift_distances(8)))

    def result_of(trial):
        if trial.task.endswith("prove"):
            return proved, {}
        errors = {"blocks.0": {"1": [0.2, 0.3]}, "pooled": {"1": [0.1, 0.2], "2": [0.3, 0.4]}}
        if not trial.inputs:
            return {"errors": errors}, {}
        share = consistency[trial.family]
        right = np.arange(1000) < 900
        seed = trial.inputs[0].settings["seed"]
        same = np.random.default_rng(seed).permutation(np.arange(1000) < 1000 * share)
        # Consistent predictions are wrong here: the verdict depends on consistency, not on correctness.
        predictions = {name: {"right": pack(right & ~same), "same": pack(same)} for name in names}
        return {"errors": errors, "count": 1000, "right": pack(right), "accuracy": 0.9, "asked": predictions}, {}

    return result_of


@pytest.mark.parametrize(("cnn", "verdict"), [(0.9, "supported"), (0.5, "contradicted"), (0.703, "cannot tell")])
def test_verdicts_follow_the_results(tmp_path, proved, cnn, verdict):
    question = TranslationQuestion("translation", LAB)
    shares = dict.fromkeys(LAB.families, 0.7) | {"resnet": cnn}
    states = states_with_results(question, tmp_path, lambda _: 0.8, measure=invent_results(proved, shares))
    assert states == {"C11": verdict, "C12b": "false"}
    largest = LAB.sizes[-1]
    assert question.consistency[None].estimate(("resnet", largest)).value == pytest.approx(cnn, abs=0.02)
    assert question.numbers()["errors"][f"vit trained {largest} pooled 2"] == pytest.approx(0.35)


def test_verdicts_without_results_are_not_run(tmp_path):
    assert states_without_results(TranslationQuestion("translation", LAB), tmp_path) == {
        "C11": "not run",
        "C12b": "not run",
    }


def test_exact_statements_hold(proved):
    zero = {"cnn", "cnn-stride-4", "embedding", "mlp", "norm", "attention", "block"}
    assert {name for name, value in proved.items() if value < 1e-9} == zero
    assert all(value > 1e-2 for name, value in proved.items() if name not in zero)


def test_measuring_a_model_twice_gives_identical_results(tmp_path):
    trial = LAB.train("vit", count=100, seed=0)
    model = redraw(build(read_config(trial.settings)))
    save(Bundle(model=model, preprocess=LAB.images.preprocess), tmp_path / "bundle")
    results = [measure({}, LAB.images, [tmp_path / "bundle"], tmp_path).result for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["count"] == 360
    assert set(results[0]["errors"]) == {*(f"blocks.{layer}" for layer in range(4)), "pooled"}
    untrained = measurement_trial("x", trial, 1, untrained=True)
    before = measure(untrained.settings, LAB.images, [], tmp_path).result
    assert set(before) == {"errors"}
