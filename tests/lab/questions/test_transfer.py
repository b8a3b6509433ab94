"""The transfer and self-supervision questions: halves of classes, probes, and verdicts from invented results."""

import dataclasses

import numpy as np
import pytest
import torch

import vitrail
from tests.fake_lab import validation_accuracy
from vitrail.data.sources.registry import open_data
from vitrail.lab.images import prepare
from vitrail.lab.question import Lab
from vitrail.lab.questions import self_supervision
from vitrail.lab.questions.self_supervision import SelfSupervisionQuestion, learn, probe_pixels
from vitrail.lab.questions.transfer import TransferQuestion, halves, transfer
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


@pytest.mark.parametrize(("sign", "state"), [(1, "supported"), (-1, "contradicted"), (0, "cannot tell")])
def test_transfer_verdict_follows_few_shot_accuracy(tmp_path, sign, state):
    results, question = Results(tmp_path / "r.jsonl", "x"), TransferQuestion("transfer", LAB)
    generator = np.random.default_rng(0)
    for (_, _, count), trials in question.trials.items():
        for trial in trials:
            share = 0.5 + sign * 0.3 * (count == 300) + generator.normal(0, 0.01)
            add(results, trial, {"fewshot": share, "finetuned": share})
    question.read(results)
    states = {verdict.claim: verdict.state(0.05) for verdict in question.verdicts()}
    assert states == {"C6": state, "C28": "reported"}
    figures = dict(question.figures())
    assert set(figures) == {"transfer-fewshot", "transfer-finetuned"}
    assert "hidden layer" in question.html(figures)


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


def test_probe_works_on_models_trained_without_labels(tmp_path):
    question = SelfSupervisionQuestion("self", LAB)
    trained, untrained = (question.trials["ViT", is_trained][0] for is_trained in (True, False))
    first = learn(untrained.settings, DIGITS, [], tmp_path / "untrained").result
    second = learn(trained.clone_with(learning_rate=1e-3, seen=256).settings, DIGITS, [], tmp_path / "trained").result
    assert first["right"] != second["right"]
    assert first["accuracy"] > 0.3
    models = [vitrail.load(tmp_path / name).model for name in ("untrained", "trained")]
    assert not torch.equal(*(next(model.blocks.parameters()) for model in models))
    assert probe_pixels({"count": 300}, DIGITS, [], tmp_path).result["accuracy"] > 0.7


def test_probe_layer_is_chosen_by_validation_images(tmp_path, monkeypatch):
    untrained = SelfSupervisionQuestion("self", LAB).trials["ViT", False][0]
    all_right = np.ones(len(DIGITS.test), bool)

    def probe(_model, _images, _few, layer):
        """The second layer is best by validation images, and worst by test images."""
        return (0.9, ~all_right) if layer == 1 else (0.2, all_right)

    monkeypatch.setattr(self_supervision, "_probe", probe)
    result = learn(untrained.settings, DIGITS, [], tmp_path / "untrained").result
    assert (result["layer"], result["validation_accuracy"], result["accuracy"]) == (1, 0.9, 0)


def test_self_supervision_verdict_follows_the_probes(tmp_path):
    results, question = Results(tmp_path / "r.jsonl", "x"), SelfSupervisionQuestion("self", LAB)
    generator = np.random.default_rng(0)
    for (_, is_trained), trials in question.trials.items():
        for trial in trials:
            right = generator.random(2000) < (0.6 if is_trained else 0.5)
            result = {"accuracy": float(right.mean()), "right": pack(right), "count": 2000}
            add(results, trial, result)
    question.read(results)
    (verdict,) = question.verdicts()
    assert verdict.state(0.05) == "supported"
    assert "60." in question.html({}) or "59." in question.html({})
