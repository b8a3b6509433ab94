"""The transfer and self-supervision questions: halves of classes, probes, and verdicts from invented results."""

import dataclasses

import numpy as np
import pytest
import torch

import vitrail
from tests.fake_lab import validation_accuracy, verdict_states
from vitrail.data.sources.registry import open_data
from vitrail.lab.images import prepare
from vitrail.lab.question import Lab
from vitrail.lab.questions import self_supervision
from vitrail.lab.questions.self_supervision import SelfSupervisionQuestion, learn
from vitrail.lab.questions.transfer import METHODS, TransferQuestion, halves, transfer
from vitrail.lab.trial import pack
from vitrail.lab.trial_results import Results

DIGITS = prepare(open_data("digits"))
LAB = Lab(DIGITS, ("vit", "resnet"), (100, 300), 3, 256)


def test_halves_are_disjoint_and_complete():
    first, second = halves(DIGITS)
    assert set(first.labels) | set(second.labels) == set(DIGITS.labels)
    assert not set(first.labels) & set(second.labels)
    for part in ("training", "validation", "test"):
        splits = [getattr(images, part) for images in (first, second)]
        assert sum(map(len, splits)) == len(getattr(DIGITS, part))
    names = [first.labels[label] for label in first.test.labels]
    pixels = {
        image.tobytes(): DIGITS.labels[label]
        for image, label in zip(DIGITS.test.images, DIGITS.test.labels, strict=True)
    }
    assert names == [pixels[image.tobytes()] for image in np.asarray(first.test.images)]


def add(results, trial, result):
    """Add the result of a trial, and the trials that choose its learning rate."""

    def put(required):
        if not results.has(required):
            validation = {"validation_accuracy": validation_accuracy(required.settings["learning_rate"])}
            record = {"cell": required.to_json(), "result": result | validation, "measured": {}}
            results.add({"key": required.trial_id("x"), **record})

    for rate_trial in results.rate_trials(trial):
        put(rate_trial)
    put(results.resolve(trial))


def invent_transfer(folder, share_of):
    """Return a transfer question with invented predictions. `share_of` gives the accuracy from the key of a trial."""
    results, question = Results(folder / "r.jsonl", "x"), TransferQuestion("transfer", LAB)
    generator = np.random.default_rng(0)
    for key, trials in question.trials.items():
        for trial in trials:
            difficulty = (np.arange(2000) + 0.5) / 2000  # the same images are difficult for all models
            draws = [difficulty < share_of(*key) + generator.normal(0, 0.01) for _ in range(2)]
            right = {"fewshot_right": list(map(pack, draws)), "finetuned_right": pack(draws[0]), "count": 2000}
            add(results, trial, right)
    question.read(results)
    return question


@pytest.mark.parametrize(("sign", "state"), [(1, "supported"), (-1, "contradicted"), (0, "cannot tell")])
def test_transfer_verdict_follows_few_shot_accuracy(tmp_path, sign, state):
    question = invent_transfer(tmp_path, lambda _family, _head, count: 0.5 + sign * 0.3 * (count == 300))
    assert verdict_states(question) == {"C6": state, "C28": "reported"}
    figures = dict(question.figures())
    assert set(figures) == {"transfer-fewshot", "transfer-finetuned"}
    assert "hidden layer" in question.html(figures)


def test_transfer_contrasts_are_paired_by_image(tmp_path):
    """Images are difficult for both models, so the images add no error to the difference, but to each accuracy."""
    question = invent_transfer(tmp_path, lambda _family, head, _count: 0.6 if head == "hidden" else 0.5)
    finetuned = question.accuracies["finetuned"]
    hidden, linear = (("vit", head, 300) for head in ("hidden", "linear"))
    assert finetuned.estimate(hidden).image_error > 0.01
    difference = finetuned.difference(hidden, linear)
    assert difference.image_error < 0.008
    assert difference.rates == pytest.approx((difference.value, difference.value))  # one rate is best by far


def test_transfer_reports_accuracies_by_head_and_their_difference(tmp_path):
    question = invent_transfer(tmp_path, lambda _family, head, _count: 0.6 if head == "hidden" else 0.5)
    fields = next(verdict.fields for verdict in question.verdicts() if verdict.claim == "C28")
    shares = {head: float(fields[head].rstrip("%")) for head in ("hidden", "linear")}
    assert shares == pytest.approx({"hidden": 60, "linear": 50}, abs=2)
    assert float(fields["difference"].split()[0]) == pytest.approx(shares["hidden"] - shares["linear"], abs=0.11)
    assert "…" in fields["difference"]


@pytest.mark.parametrize("question_class", [TransferQuestion, SelfSupervisionQuestion])
def test_verdicts_without_results_are_not_run(tmp_path, question_class):
    question = question_class("name", LAB)
    question.read(Results(tmp_path / "r.jsonl", "x"))
    assert {verdict.state(0.05) for verdict in question.verdicts()} <= {"not run", "reported"}
    assert "Nothing was run" in question.html(dict(question.figures()))


def test_transfer_with_two_classes_has_no_trials():
    two = Lab(dataclasses.replace(DIGITS, labels=DIGITS.labels[:2]), ("vit", "resnet"), (100,), 2, 256)
    question = TransferQuestion("transfer", two)
    assert (question.trials, [list(question_round) for question_round in question.rounds()]) == ({}, [[], [], []])


def test_transfer_pre_trains_on_one_half_and_learns_the_other(tmp_path):
    trial = TransferQuestion("transfer", LAB).trials["vit", "linear", 100][0].clone_with(learning_rate=3e-3, seen=640)
    result = transfer(trial.settings, DIGITS, [], tmp_path / "cell").result
    assert result == transfer(trial.settings, DIGITS, [], tmp_path / "again").result
    assert vitrail.load(tmp_path / "cell").labels == halves(DIGITS)[0].labels
    assert 0.2 < result["fewshot"] <= 1
    means = {method: float(np.mean(read(result))) for method, read in METHODS.items()}
    assert means == pytest.approx({"fewshot": result["fewshot"], "finetuned": result["finetuned"]})


def test_probe_works_on_models_trained_without_labels(tmp_path):
    question = SelfSupervisionQuestion("self", LAB)
    trained, untrained = (question.trials["ViT", is_trained][0] for is_trained in (True, False))
    first = learn(untrained.settings, DIGITS, [], tmp_path / "untrained").result
    second = learn(trained.clone_with(learning_rate=1e-3, seen=256).settings, DIGITS, [], tmp_path / "trained").result
    assert first["right"] != second["right"]
    assert first["accuracy"] > 0.3
    models = [vitrail.load(tmp_path / name).model for name in ("untrained", "trained")]
    assert not torch.equal(*(next(model.blocks.parameters()) for model in models))


def test_probe_layer_is_chosen_by_validation_images(tmp_path, monkeypatch):
    untrained = SelfSupervisionQuestion("self", LAB).trials["ViT", False][0]
    all_right = np.ones(len(DIGITS.test), bool)

    def probe(_model, _images, _few, layer):
        """The second layer is best by validation images, and worst by test images."""
        return (0.9, ~all_right) if layer == 1 else (0.2, all_right)

    monkeypatch.setattr(self_supervision, "_probe", probe)
    result = learn(untrained.settings, DIGITS, [], tmp_path / "untrained").result
    assert (result["layer"], result["validation_accuracy"], result["accuracy"]) == (1, 0.9, 0)
