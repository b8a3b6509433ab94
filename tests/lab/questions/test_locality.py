"""The locality question: verdicts from invented results, and exact statements."""

import numpy as np
import pytest
import torch

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from vitrail.lab import internals
from vitrail.lab.measurements import measurement_trial
from vitrail.lab.questions.locality import LocalityQuestion, measure, prove, reached_tokens

LAB = digits_lab()


@pytest.fixture(scope="module")
def proved():
    return prove({}, LAB.images, [], None).result


def invent_results(proved, areas, trained_heads=0.5):
    """Return a function that invents the outcome of a trial from receptive areas by family.

    Heads differ by `trained_heads` after training and by 0.3 before.
    """

    def result_of(trial):
        if trial.task.endswith("prove"):
            return proved, {}
        seed = trial.inputs[0].settings["seed"] if trial.inputs else trial.settings["seed"]
        generator = np.random.default_rng(seed)
        layer_areas = [float(area) for area in areas[trial.family] + generator.normal(0, 0.01, 24)]
        heads = {"0": [0.6, 1.1], "1": [0.9, 1.0]} if trial.family in ("vit", "hybrid") else {}
        near = {"nearest": [0.6 + seed / 100, 0.61]} if heads else {}
        if heads:
            is_trained = bool(trial.inputs)
            near["head_difference"] = (trained_heads if is_trained else 0.3) + 0.01 * seed * (1 + is_trained)
        first = [1 - area for area in layer_areas]  # reversed after the first layer
        return {"third": 1, "areas": {"0": first, "1": layer_areas}, "heads": heads, **near}, {}

    return result_of


@pytest.mark.parametrize(("cnn", "verdict"), [(0.1, "supported"), (0.8, "contradicted"), (0.4, "cannot tell")])
def test_verdicts_follow_the_results(tmp_path, proved, cnn, verdict):
    question = LocalityQuestion("locality", LAB)
    areas = dict.fromkeys(LAB.families, 0.4) | {"resnet": cnn}
    states = states_with_results(question, tmp_path, lambda _: 0.8, measure=invent_results(proved, areas))
    assert states == {"C10": verdict, "C12a": "true", "C15": "true", "C41": "supported"}
    assert set(dict(question.figures())) == {"locality-area", "locality-dose", "locality-heads"}
    fields = {verdict.claim: verdict.fields for verdict in question.verdicts()}
    assert fields["C15"]["trained"] == "60% … 110%"
    assert question.numbers()["nearest"]["vit 300"][0] == pytest.approx(0.6075)


@pytest.mark.parametrize(("trained_heads", "verdict"), [(0.1, "contradicted"), (0.3, "cannot tell")])
def test_heads_must_differ_more_than_before_training(tmp_path, proved, trained_heads, verdict):
    """Untrained heads differ, too: they count by the difference under the same seed."""
    question = LocalityQuestion("locality", digits_lab(seeds=4))
    measure = invent_results(proved, dict.fromkeys(LAB.families, 0.4), trained_heads)
    states = states_with_results(question, tmp_path, lambda _: 0.8, measure=measure)
    assert states["C41"] == verdict
    growth = question.head_difference.difference(("vit", 300), ("vit", 0))
    assert growth.value == pytest.approx(trained_heads - 0.3 + 0.015)
    assert growth.error == pytest.approx(0.01 * np.std(range(4), ddof=1) / 2)


def test_difference_of_heads_is_the_mean_over_pairs():
    """The distance of two heads is 0 if they are equal and 1 if they attend to different tokens."""
    first, second = np.eye(4), np.eye(4)[::-1]
    assert internals._mean_difference(np.stack([first, first])) == 0
    assert internals._mean_difference(np.stack([first, second])) == 1
    assert internals._mean_difference(np.stack([first, first, second])) == pytest.approx(2 / 3)


def test_verdicts_without_results_are_not_run(tmp_path):
    expected = dict.fromkeys(("C10", "C12a", "C15", "C41"), "not run")
    assert states_without_results(LocalityQuestion("locality", LAB), tmp_path) == expected


def test_models_have_a_grid_of_at_least_seven():
    question = LocalityQuestion("locality", LAB)
    settings = [
        trials[0].inputs[0].settings["model"] for (family, _), trials in question.trials.items() if family == "vit"
    ]
    assert {tuple(model["patch"]) for model in settings} == {(1, 1)}  # 8 x 8 patches of one pixel


def test_exact_statements_hold(proved):
    assert proved == {"norm": 1, "mlp": 1, "attention": 49, "embedding": 1, "first-layer": 49, "tokens": 49}
    line = torch.nn.Conv1d(3, 3, 3, padding=1, bias=False).double()
    source = torch.randn(1, 5, 3, dtype=torch.float64)
    near = reached_tokens(lambda x: line(x.transpose(1, 2)).transpose(1, 2), source, lambda gradient: gradient)
    assert near.tolist() == [[abs(row - column) <= 1 for column in range(5)] for row in range(5)]


def test_untrained_vit_has_no_distance_preference_and_cnn_is_more_local():
    measured = {}
    for family in ("vit", "resnet"):
        trained = LAB.train(family, count=100, seed=0, changes={"patch": 1} if family == "vit" else None)
        measured[family] = measure(
            measurement_trial("x", trained, 1, untrained=True).settings, LAB.images, [], None
        ).result
    assert all(abs(distance - 1) < 0.1 for distance in measured["vit"]["heads"]["0"])
    area = {family: np.mean(result["areas"][str(result["third"])]) for family, result in measured.items()}
    assert area["resnet"] < area["vit"]
    assert "nearest" not in measured["resnet"]
    assert 0 < measured["vit"]["head_difference"] < 0.3
    assert len(measured["vit"]["head_differences"]) == 4
