"""The order question: recency and causality against exact values, and verdicts from invented numbers."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.made_up import InventedResults, states
from vitrail.data.sources.registry import open_data
from vitrail.lab.images import prepare
from vitrail.lab.lab_report import write_report
from vitrail.lab.position_measures import recency_index, removal_effect_by_position, strength_by_position
from vitrail.lab.question import Lab
from vitrail.lab.questions.order import ORDERS, PAIRS, OrderQuestion, measure, prove
from vitrail.lab.training import read_config, train
from vitrail.lab.trial_results import Results
from vitrail.models.create import build
from vitrail.models.families.lstm.model import sequence_order

LAB = Lab(prepare(open_data("digits")), ("vit", "lstm"), (300, 1240), 3, 256)


def test_recency_index_is_the_centre_of_mass():
    assert recency_index(np.ones(16)) == pytest.approx(0.5)
    assert recency_index(np.eye(16)[0]) == 0
    assert recency_index(np.eye(16)[15]) == 1
    assert recency_index(2.0 ** np.arange(3)) == pytest.approx((2 + 8) / (2 * 7))


class Weighted(nn.Module):
    """A linear model whose weights are the raster index of the patch."""

    def forward(self, images):
        weights = torch.arange(16.0).repeat_interleave(4).view(4, 4, 2, 2).permute(0, 2, 1, 3).reshape(8, 8)
        return (images * weights).sum((1, 2, 3))[:, None].repeat(1, 10)


def test_strength_is_the_gradient_norm_in_reading_order():
    images, labels = torch.rand(5, 1, 8, 8), torch.arange(5)
    order = sequence_order("snake", (4, 4))
    strength = strength_by_position(Weighted(), images, labels, (2, 2), order)
    np.testing.assert_allclose(strength, 2 * order.numpy())  # the norm of four equal numbers is twice the number


def test_removal_effect_is_the_change_of_the_logit():
    images, labels = torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long)
    images[0] = 2  # both differ by 1 from the mean image
    order = sequence_order("column", (4, 4))
    effect = removal_effect_by_position(Weighted(), images, labels, (2, 2), order)
    np.testing.assert_allclose(effect, 4 * order.numpy(), rtol=1e-4)


@pytest.mark.parametrize("order", ["raster", "snake"])
def test_forgetting_lstm_has_recency_near_one(order):
    """Without recurrent weights, the forget gate f is the only memory, so strength falls by the factor f per step."""
    model = build(LAB.images.matched_config("lstm", order=order, depth=1))
    hidden = model.config.hidden
    with torch.no_grad():
        nn.init.normal_(model.head.weight)
        model.layers[0].weight_hh_l0.zero_()
        model.layers[0].weight_ih_l0[hidden : 2 * hidden] = 0
        model.layers[0].bias_ih_l0[hidden : 2 * hidden] = -2
    forget_gate = torch.sigmoid(torch.tensor(-2.0)).item()
    images, labels = torch.zeros(2, 1, 8, 8), torch.arange(2)  # constant images: patches differ in time only
    strength = strength_by_position(model, images, labels, (2, 2), sequence_order(order, (4, 4)))
    np.testing.assert_allclose(strength[5:14] / strength[6:15], forget_gate, rtol=1e-3)
    assert recency_index(strength) > 0.95


@pytest.fixture(scope="module")
def proved():
    return prove(OrderQuestion("order", LAB).proof_trial.settings, LAB.images, [], None).result


def test_proof_shows_that_only_the_lstm_depends_on_order(proved):
    assert set(proved["orders"]) == set(ORDERS) - {"raster"}
    assert min(proved["orders"].values()) > 0.01
    assert max(proved["moved"].values()) < 1e-9
    assert proved["vit without positions"] < 1e-9
    assert proved["later"] == {"lstm": 0, "vit": 120}


def test_measuring_a_trained_lstm_twice_gives_identical_results(tmp_path):
    question = OrderQuestion("order", LAB)
    trial = question.fine_trials["reversed"][0].clone_with(learning_rate=1e-3, count=100, seen=128)
    train(trial.settings, LAB.images, [], tmp_path / "cell")
    result, _ = measure({"order": "reversed", "images": 16}, LAB.images, [tmp_path / "cell"], tmp_path)
    repeated, _ = measure({"order": "reversed", "images": 16}, LAB.images, [tmp_path / "cell"], tmp_path)
    assert result == repeated
    assert [len(result[when]["strength"]) for when in ("before", "after")] == [64, 64]
    assert result["before"]["recency"] == recency_index(np.array(result["before"]["strength"]))
    assert min(result["before"]["strength"]) > 0  # the head is not zero
    assert result["before"]["strength"] != result["after"]["strength"]
    assert 0 <= result["agreement"] <= 1
    assert 0 <= result["removal"] <= 1


def test_fine_models_have_equal_cost_and_the_finest_grid():
    trials = OrderQuestion("order", LAB).fine_trials
    assert set(trials) == {"raster", "reversed", "random", "random-reversed", "vit"}
    configs = {name: read_config(group[0].settings) for name, group in trials.items()}
    assert {config.patches for config in configs.values()} == {64}
    costs = [config.macs for config in configs.values()]
    assert max(costs) / min(costs) < 1.06


def test_reverse_of_an_order_has_the_complementary_recency():
    """So ViT, which has no order, has 0.5 in the mean over an order and its reverse."""
    strength = np.random.default_rng(0).random(16)
    for order, reverse in PAIRS:
        indices = [recency_index(strength[sequence_order(name, (4, 4)).numpy()]) for name in (order, reverse)]
        assert np.mean(indices) == pytest.approx(0.5)


def invent(folder, proved, index, parity=(0.9, 0.5)):
    """Return a question with invented recency indices by order, and accuracies of LSTM and ViT on parity."""
    question = OrderQuestion("order", LAB)
    invented = InventedResults(folder, question)
    invented.put(question.proof_trial, **proved)
    for trials in question.trials.values():
        for trial in trials:
            invented.train(trial, 0.8)
    for name, trials in question.fine_trials.items():
        for seed, (trial, measurement) in enumerate(zip(trials, question.measurement_trials[name], strict=True)):
            invented.train(trial, 0.8)
            strength = {"strength": [1.0] * 64, "recency": index.get(name, 0.7) + 0.01 * seed}
            resolved = invented.results.resolve(measurement)
            untrained = {**strength, "recency": 1 - strength["recency"]}  # the verdict uses the trained model
            invented.put(resolved, before=untrained, after=strength, removal=0.7, agreement=0.5)
    for (task, family, length), trials in question.sequence_trials.items():
        share = parity[family == "vit"] if task == "parity" else 0.5 + 8 / length
        for trial in trials:
            invented.train(trial, share, same_length=0.99)
    return question, invented


def test_verdicts_hold_for_numbers_in_favour(tmp_path, proved):
    question, invented = invent(tmp_path, proved, {})
    assert states(question, invented) == {"C32b": "supported", "C33": "true", "C46": "supported"}
    verdicts = {verdict.claim: verdict for verdict in question.verdicts()}
    assert verdicts["C32b"].estimate.value == pytest.approx(0.21)
    assert verdicts["C32b"].fields == {"lstm": "100, 75, 62, 56", "vit": "100, 75, 62, 56", "steps": "16, 32, 64, 128"}
    assert verdicts["C46"].fields["lstm_same"] == "99.0%"


def test_verdicts_fail_for_numbers_against(tmp_path, proved):
    question, invented = invent(tmp_path, proved, dict.fromkeys(ORDERS, 0.1), parity=(0.5, 0.6))
    invented.put(question.proof_trial, **(proved | {"later": {"lstm": 3, "vit": 120}}))
    assert states(question, invented) == {"C32b": "contradicted", "C33": "false", "C46": "contradicted"}


def test_recency_in_one_direction_only_decides_nothing(tmp_path, proved):
    """If the content of the images is read late in one order, it is read early in its reverse."""
    question, invented = invent(
        tmp_path, proved, {"raster": 0.8, "reversed": 0.2, "random": 0.6, "random-reversed": 0.4}
    )
    question.read(invented.results)
    verdict = next(question.verdicts())
    assert verdict.estimate.value == pytest.approx(0.01)
    assert verdict.estimate.error == pytest.approx(0.01 / np.sqrt(3))
    assert verdict.state(0.05) == "cannot tell"


def test_missing_trials_are_not_run_and_report_is_written(tmp_path, proved):
    question = OrderQuestion("order", LAB)
    question.read(Results(tmp_path / "none.jsonl", "x"))
    assert {verdict.state(0.05) for verdict in question.verdicts()} == {"not run"}
    assert dict(question.figures()) == {}
    question, invented = invent(tmp_path, proved, {})
    question.read(invented.results)
    claims = write_report(tmp_path, LAB, {"order": question}, machines={}, commands=[])
    assert claims["numbers"]["order"]["recency"]["raster"]["after"] == pytest.approx([0.7, 0.71, 0.72])
    figures = {path.name for path in (tmp_path / "figures").glob("*.svg")}
    assert figures >= {"order-accuracy.svg", "order-strength.svg", "order-recall.svg"}


def test_raster_trials_are_shared_with_other_questions():
    question = OrderQuestion("order", LAB)
    assert question.trials["raster"][1] == LAB.train("lstm", count=1240, seed=1)
    groups = (question.trials, question.fine_trials, question.measurement_trials, question.sequence_trials)
    trial_ids = {trial.trial_id("") for group in groups for trials in group.values() for trial in trials}
    assert trial_ids <= {trial.trial_id("") for trial in question.rounds()[-1]}


def test_question_without_its_family_trains_nothing():
    lab = Lab(LAB.images, ("mixer",), LAB.sizes, 2, 256)
    question = OrderQuestion("order", lab)
    assert question.rounds() == ([question.proof_trial],)
