"""The compute question: the lead of the hybrid at the smallest compute."""

import pytest

from tests.fake_lab import digits_lab, states_with_results, states_without_results
from vitrail.lab.questions.compute import FACTORS, ComputeQuestion


def accuracy(lead):
    def share(settings):
        model = settings["model"]
        is_least = model.get("width") == 24 and settings["seen"] == 200
        return 0.6 + (lead if is_least and model["family"] == "hybrid" else 0)

    return share


@pytest.mark.parametrize(("lead", "verdict"), [(0.1, "supported"), (-0.1, "contradicted"), (0.0, "cannot tell")])
def test_verdict_uses_the_smallest_compute(tmp_path, lead, verdict):
    question = ComputeQuestion("compute", digits_lab(seeds=4))
    assert states_with_results(question, tmp_path, accuracy(lead)) == {"C29": verdict}
    shrinking = question.shrinking()
    assert shrinking is not None
    assert shrinking.value == pytest.approx(lead, abs=0.01)


def test_verdicts_without_results_are_not_run(tmp_path):
    assert states_without_results(ComputeQuestion("compute", digits_lab()), tmp_path) == {"C29": "not run"}


def test_families_have_equal_cost_at_every_width():
    question = ComputeQuestion("compute", digits_lab())
    for factor in FACTORS:
        cost = question.config("vit", factor).macs
        assert abs(question.config("hybrid", factor).macs / cost - 1) < 0.06
        assert abs(question.config("resnet", factor).macs / cost - 1) < 0.06
