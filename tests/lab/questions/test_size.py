"""The size question: gains of doubled models."""

import pytest

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from vitrail.lab.questions.size import SizeQuestion


def accuracy(gains):
    """Return accuracies with `gains` of deeper and wider models at the largest n and none at the smallest."""

    def share(settings):
        model = settings["model"]
        is_largest = settings["count"] == 300
        is_variant = {"deeper": model.get("depth") == 8, "wider": model.get("width") == 96}
        return 0.5 + 0.2 * is_largest + is_largest * sum(gains[name] for name in gains if is_variant[name])

    return share


@pytest.mark.parametrize(
    ("deeper", "wider", "verdict"),
    [(0.1, 0.1, "supported"), (-0.1, 0.1, "contradicted"), (0.1, -0.1, "contradicted"), (0.1, 0.0, "cannot tell")],
)
def test_verdict_needs_a_gain_of_both_doublings(tmp_path, deeper, wider, verdict):
    question = SizeQuestion("size", digits_lab())
    states = states_with_results(question, tmp_path, accuracy({"deeper": deeper, "wider": wider}))
    assert states == {"C5": verdict, "C9": "reported"}
    assert question.gap(("vit-base", 100)) == pytest.approx(0.5, abs=0.01)


def test_verdicts_without_results_are_not_run(tmp_path):
    assert states_without_results(SizeQuestion("size", digits_lab()), tmp_path) == {
        "C5": "not run",
        "C9": "not run",
    }
    assert states_without_results(SizeQuestion("size", digits_lab(sizes=(300,))), tmp_path)["C5"] == "not run"


def test_double_depth_costs_twice_and_double_width_four_times():
    images = digits_lab().images
    for family in ("vit", "hybrid", "resnet"):
        config = images.matched_config(family)
        wider = config.replace(**config.wider(2))
        assert 3.5 < wider.macs / config.macs < 4.1
        assert 1.6 < config.replace(**config.deeper(2)).macs / config.macs < 2.2
    vit = images.matched_config("vit")
    assert vit.wider(2) == {"width": 96, "mlp": 192, "heads": 6}
    assert vit.wider(0.5) == {"width": 24, "mlp": 48, "heads": 3}  # three heads have no half
