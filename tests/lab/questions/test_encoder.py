"""The encoder question: losses of variants, gradients, entropies and batch statistics."""

import json

import pytest
import torch

import vitrail
from tests.fake_lab import digits_lab, states_with_results, states_without_results, verdict_states
from vitrail.lab.exact import redraw
from vitrail.lab.questions.encoder import (
    LOSSES,
    EncoderQuestion,
    attention_entropy,
    batch_mates,
    batch_statistics,
    gradients,
)


@pytest.fixture(scope="module")
def question():
    return EncoderQuestion("encoder", digits_lab(seeds=3))


def measure(trial):
    """Invent the results of measurements."""
    task = trial.task.rpartition(":")[2]
    return {
        "gradients": {"norms": [1.0, 2.0, 3.0]},
        "batch_mates": {"layer": 1e-15, "batch": 0.1},
        "attention_entropy": {"entropy": [0.9, 0.8]},
        "batch_statistics": {"accuracies": [0.5, 0.6]},
    }[task], {}


@pytest.mark.parametrize(("lost", "verdict"), [(0.1, "supported"), (-0.1, "contradicted"), (0, "cannot tell")])
def test_verdicts_follow_the_loss_of_each_variant(tmp_path, question, lost, verdict):
    """Every variant loses as much against its reference, and BatchNorm with small batches twice as much."""

    def identify(settings):
        return json.dumps([settings[name] for name in ("model", "recipe", "seen")], sort_keys=True)

    names = {identify(trials[0].settings): name for (name, _), trials in question.trials.items()}
    assert len(names) == len(question.variants)

    def accuracy(settings):
        name = names[identify(settings)]
        return 0.7 - lost * (question.variants[name].against is not None) * (2 if name == "batch-4" else 1)

    states_with_results(question, tmp_path, accuracy, measure=measure)
    states = verdict_states(question, 0.001)
    assert {claim: states[claim] for claim in (*LOSSES, "C24", "C43")} == {
        **dict.fromkeys((*LOSSES, "C43"), verdict),
        "C24": "true",
    }
    numbers = question.numbers()
    assert numbers["norms"]["post"] == [1, 2, 3]
    assert numbers["accuracies"]["batch-4"] == [0.5, 0.6]


def test_verdicts_without_results_are_not_run(tmp_path, question):
    assert set(states_without_results(question, tmp_path).values()) == {"not run"}


def test_round_holds_both_sides_of_a_contrast(question):
    proofs, first, second = question.rounds()[:3]
    assert proofs == list(question.proof_trials)
    trained = [trial for trial in first if trial.task.endswith(":train")]
    assert len(trained) == 12  # a reference and three variants, with three seeds
    assert question.lab.train("vit", count=300, seed=1) in trained
    assert [trial.settings["seed"] for trial in second if trial.task.endswith(":gradients")] == [0, 1, 2, 0, 1, 2]


def test_output_depends_on_the_batch_only_with_batch_norm(question):
    change = batch_mates(question.proof_trials[0].settings, question.lab.images, [], None).result
    assert change["layer"] < 1e-12
    assert change["batch"] > 1e-3


def test_gradient_of_the_last_layer_is_larger_with_post_ln(question):
    """arXiv 2002.04745, theorem 1: at initialisation they are independent of the depth L with post-LN, and fall as
    1 / sqrt(L) with pre-LN."""
    gradient_norms = {
        key[0]: gradients(trials[0].settings, question.lab.images, [], None).result["norms"]
        for key in question.keys
        for trials in [question.measurement_trials(key).get("norms")]
        if trials is not None
    }
    assert {name: len(norms) for name, norms in gradient_norms.items()} == {"pre": 12, "post": 12}
    assert gradient_norms["post"][-1] > 1.5 * gradient_norms["pre"][-1]


def test_entropy_of_uniform_attention_is_one(question, tmp_path):
    images = question.lab.images
    model = redraw(vitrail.create("ViT-Pico/2", channels=1, classes=10))
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[:48] = 0
            block.attn.qkv.bias[:48] = 0
    vitrail.save(vitrail.Bundle(model=model, preprocess=images.preprocess), tmp_path / "one")
    assert attention_entropy({}, images, [tmp_path / "one"], None).result["entropy"] == pytest.approx([1] * 4)


def test_batch_statistics_change_accuracy_only_with_batch_norm(question, tmp_path):
    """LayerNorm has no batch statistics, so all batch sizes give the same accuracy."""
    images = question.lab.images
    accuracies = {}
    for norm in ("layer", "batch"):
        model = redraw(vitrail.create("ViT-Pico/2", channels=1, classes=10, norm=norm))
        vitrail.save(vitrail.Bundle(model=model, preprocess=images.preprocess), tmp_path / norm)
        accuracies[norm] = batch_statistics({"batches": [4, 128]}, images, [tmp_path / norm], None).result["accuracies"]
    assert accuracies["layer"][0] == accuracies["layer"][1]
    assert accuracies["batch"][0] != accuracies["batch"][1]
