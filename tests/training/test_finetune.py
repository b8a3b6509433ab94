"""Fine-tuning: adaptation of a bundle, heads fitted by least squares, and the choice of the model to keep."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.training.runs import finetune, train
from tests.training.test_resume import forge
from vitrail.core.errors import UsageError, VitrailError
from vitrail.core.least_squares import Ridge
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.compare_runs import compare_runs
from vitrail.evaluation.feature_classifiers import fit_ridge_head
from vitrail.evaluation.features import extract_features
from vitrail.evaluation.protocols import evaluate
from vitrail.lab.exact import redraw
from vitrail.training.adapt_channels import adapt_channels
from vitrail.training.finetune import adapt_bundle, replace_head
from vitrail.training.loop import Trainer
from vitrail.training.objectives.classify import Classify
from vitrail.training.options import Options
from vitrail.training.recipe import OBJECTIVES, Recipe, change_recipe, find_recipe

LABELS = ("ant", "bee", "cat")
PLAIN = Recipe(steps=1)


def small(name="ViT-Micro/4", **changes):
    settings = {"resolution": 32, "classes": 3, "channels": 3, **changes}
    return redraw(vitrail.create(name, **settings).eval(), std=0.05)


def bundle_of(model, labels=LABELS, **provenance):
    preprocess = Preprocess(
        resolution=model.config.resolution, mean=IMAGENET_MEAN, std=IMAGENET_STD, resize="squash", crop_fraction=1.0
    )
    return vitrail.Bundle(model=model, preprocess=preprocess, labels=labels, provenance=provenance)


def events(folder, kind):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


# Adaptation of a bundle to the data


def test_same_classes_keep_head_in_order_of_data():
    model = small()
    images = torch.rand(4, 3, 32, 32)
    adapted, note = replace_head(model, bundle_of(model), ("cat", "ant", "bee"))
    torch.testing.assert_close(adapted.eval()(images), model(images)[:, [2, 0, 1]])
    assert "those of the bundle: its head is kept" in note
    # Without names, classes are matched by index. A head that was not trained is not adapted.
    adapted, note = replace_head(model, bundle_of(model, labels=None), ("2", "0", "1"))
    torch.testing.assert_close(adapted.eval()(images), model(images)[:, [2, 0, 1]])
    _, note = replace_head(model, bundle_of(model, labels=None, objective="masked"), ("2", "0", "1"))
    assert "a new head" in note


@pytest.mark.parametrize("name", ["ViT-Micro/4", "ResNet-Micro", "Mixer-Micro/4", "LSTM-Micro/4"])
def test_other_classes_get_zero_head_on_same_features(name):
    model = small(name)
    images = torch.rand(2, 3, 32, 32)
    adapted, note = replace_head(model, bundle_of(model), ("one", "two"))
    assert adapted.eval()(images).tolist() == [[0, 0], [0, 0]]
    pooled = [vitrail.look(each, images, [], attention=False).steps["pooled"] for each in (model, adapted)]
    assert torch.equal(*pooled)
    assert "a new head for 2 classes" in note


def test_new_head_drops_hidden_layer_of_pretraining():
    model = small(representation="tanh")
    adapted, note = replace_head(model, bundle_of(model), ("one", "two"))
    assert adapted.config.representation == "none"
    assert "hidden layer of the pre-training head is dropped" in note


def test_pixel_model_gets_classification_head():
    model = small("iGPT-Micro", output="pixels", causal=True, resolution=8, classes=16)
    adapted, note = replace_head(model, bundle_of(model, labels=None), ("one", "two"))
    assert (adapted.config.output, adapted.config.classes) == ("classes", 2)
    # The embedding of pixel n had index n + 1, after the start token.
    assert torch.equal(adapted.pos_embed[:, :-1], model.pos_embed[:, 1:])
    assert torch.equal(adapted.palette, model.palette)
    assert "start token" in note


def test_new_resolution_interpolates_positions_by_stored_rule_with_note():
    model = small(resize_rule="google")
    adapted, preprocess, notes = adapt_bundle(bundle_of(model), LABELS, 3, PLAIN, (48, 64))
    assert torch.equal(adapted.pos_embed, model.resize((48, 64), rule="google").pos_embed)
    assert preprocess.resolution == (48, 64)
    assert notes[0] == "32 px became 48 x 64, positions interpolated by the rule of google"
    # The resolution of the recipe is the default.
    recipe = Recipe(steps=1, model={"resolution": 64, "dropout": 0.5})
    assert adapt_bundle(bundle_of(model), LABELS, 3, recipe)[0].config.resolution == (64, 64)
    adapted, *_ = adapt_bundle(bundle_of(model), LABELS, 3, recipe, (32, 32))
    assert (adapted.config.resolution, adapted.config.dropout) == ((32, 32), 0.5)


def for_channels(bundle, channels):
    model, mean, std, note = adapt_channels(bundle.model, channels, bundle.preprocess.mean, bundle.preprocess.std)
    return model, bundle.preprocess.replace(mean=mean, std=std), note


@pytest.mark.parametrize("name", ["ViT-Micro/4", "Mixer-Micro/4", "LSTM-Micro/4"])
def test_grey_model_gives_same_output_as_colour_model(name):
    bundle = bundle_of(small(name))
    grey, preprocess, note = for_channels(bundle, 1)
    assert (grey.config.channels, preprocess.channels) == (1, 1)
    assert "grey" in note
    image = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 1), dtype=np.uint8)
    with torch.inference_mode():
        before = bundle.model(bundle.preprocess(list(np.repeat(image, 3, axis=3))))
        after = grey.eval()(preprocess(list(image)))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_additional_channels_repeat_kernels():
    bundle = bundle_of(small())
    adapted, preprocess, note = for_channels(bundle, 6)
    assert preprocess.mean == IMAGENET_MEAN * 2
    assert "3/6" in note
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(
            adapted.eval()(images.repeat(1, 2, 1, 1)), bundle.model(images), rtol=1e-4, atol=1e-5
        )
    # The first kernels of a CNN overlap, so it keeps three channels and grey images are converted.
    cnn = bundle_of(small("ResNet-Micro"))
    unchanged, _, note = for_channels(cnn, 1)
    assert unchanged is cnn.model
    assert note == "images with 1 channel are converted to the 3 of the model"
    with pytest.raises(UsageError, match="need a family with a patch embedding, got family resnet"):
        for_channels(cnn, 4)


# The head fitted by least squares


def test_least_squares_head_gives_exact_leave_one_out_scores():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 60)
    features = rng.normal(size=(60, 8)) + 2 * np.eye(8)[labels]
    linear, left_out = fit_ridge_head(features, labels, classes=3)
    targets = np.where(labels[:, None] == np.arange(3), 1.0, -1.0)
    penalty = Ridge(features, targets).choose_penalty()
    scale = np.linalg.norm(linear.weight) / np.linalg.norm(Ridge(features, targets).solve(penalty).weight)
    for index in (0, 17, 59):  # fitted without the sample, applied to it
        is_other = np.arange(60) != index
        alone = Ridge(features[is_other], targets[is_other]).solve(penalty)
        np.testing.assert_allclose(left_out[index], scale * alone(features[index][None])[0], rtol=1e-8)
    loss = torch.nn.functional.cross_entropy
    truth = torch.from_numpy(labels)
    losses = [float(loss(torch.from_numpy(left_out * factor), truth)) for factor in (0.8, 1.0, 1.25)]
    assert losses[1] == min(losses)


# Complete runs, on embedded data and the embedded model


def test_frozen_recipe_fits_head_by_least_squares(tmp_path, capsys):
    finetune("fashion", "digits", tmp_path / "run", find_recipe("frozen"), Options())
    output = capsys.readouterr().err
    assert "a new head for 10 classes" in output
    (probe,) = events(tmp_path / "run", "probe")
    scores = evaluate(tmp_path / "run" / "bundle", "digits")
    assert probe["accuracy"] > 0.85
    assert scores["accuracy"] > 0.85
    assert abs(scores["accuracy"] - probe["accuracy"]) < 0.06  # as the leave-one-out accuracy predicts
    assert scores["ece"] < 0.15
    bundle = vitrail.load(tmp_path / "run" / "bundle")
    assert bundle.provenance["seconds"] >= round(probe["seconds"], 1) > 0  # the head is part of the run
    body = {n: t for n, t in bundle.model.state_dict().items() if not n.startswith("head.")}
    before = vitrail.load("fashion").model.state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in body.items())
    assert bundle.provenance["steps"] == 0
    assert bundle.provenance["finetuned_from"]["bundle"] == "fashion"
    assert "leave-one-out over" in (tmp_path / "run" / "report.html").read_text()


def test_auto_recipe_trains_if_time_allows_and_resumes(tmp_path, capsys, monkeypatch):
    recipe = find_recipe("auto")
    with monkeypatch.context() as patch:
        patch.setattr("vitrail.training.length.measure_steps", lambda trainer, seconds: 9)
        finetune("fashion", "digits", tmp_path / "short", recipe, Options())
    assert (
        "9 steps would fit into 5 minutes, fewer than the 10 of least_steps: the linear head on frozen"
        in capsys.readouterr().err
    )
    assert events(tmp_path / "short", "step") == []
    steps = recipe.with_length(epochs=None, steps=6, minutes=None)
    finetune("fashion", "digits", tmp_path / "run", steps, Options())
    weights = (tmp_path / "run" / "bundle" / "model.safetensors").read_bytes()
    finetune("fashion", "digits", tmp_path / "run", steps, Options(), resumes=True)
    assert (tmp_path / "run" / "bundle" / "model.safetensors").read_bytes() == weights
    assert len(events(tmp_path / "run", "probe")) == 1  # the head is not fitted again
    assert [event["step"] for event in events(tmp_path / "run", "resume")] == [6]
    changes = vitrail.load(tmp_path / "run" / "bundle").provenance["finetuned_from"]["changes"]
    assert any("each left out in turn" in line for line in changes)  # the note is restored
    # A different bundle is rejected, even if its tensors have the same shapes.
    other = vitrail.load("fashion")
    torch.nn.init.zeros_(other.model.cls_token)
    vitrail.save(other, tmp_path / "other")
    with pytest.raises(UsageError, match="Resumed run must have the bundle that it started with"):
        finetune(tmp_path / "other", "digits", tmp_path / "run", steps, Options(), resumes=True)


@pytest.fixture
def small_data(tmp_path):
    """200 digits: 180 to train, three steps of 64 an epoch."""
    digits = open_data("digits").splits["train"].select(np.arange(200))
    np.savez(tmp_path / "small_data.npz", images=digits.images, labels=digits.labels)
    return str(tmp_path / "small_data.npz")


def test_learning_rate_is_scaled_by_residual_of_head(tmp_path, small_data, capsys):
    """The learning rate is multiplied by the mean probability of wrong labels; a resumed run keeps the factor."""
    recipe = find_recipe("auto").replace(minutes=None, steps=6, schedule="constant", warmup=0.0)
    finetune("fashion", small_data, tmp_path / "run", recipe, Options())
    (probe,) = events(tmp_path / "run", "probe")
    bundle = vitrail.load("fashion")
    training, _ = open_data(small_data).for_training(holdout=recipe.holdout, seed=0)
    model, preprocess, _ = adapt_bundle(bundle, open_data(small_data).labels, 1, recipe)
    features = extract_features(model, preprocess, training)
    _, scores = fit_ridge_head(features, training.labels, classes=10)
    own = torch.from_numpy(scores).softmax(1).numpy()[np.arange(len(features)), training.labels]
    assert probe["residual"] == pytest.approx(1 - own.mean(), rel=1e-6)
    assert 0.05 < probe["residual"] < 0.7
    rate = recipe.learning_rate * probe["residual"]
    rates = [event["learning_rate"] for event in events(tmp_path / "run", "step")]
    assert rates == [pytest.approx(rate, rel=1e-12)] * 2
    assert (
        f"peak learning rate {rate:.2g} = 0.002 x {probe['residual']:.3g} (mean probability" in capsys.readouterr().err
    )
    weights = (tmp_path / "run" / "bundle" / "model.safetensors").read_bytes()
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        if folder.name != "step-000000003":
            shutil.rmtree(folder)
    finetune("fashion", small_data, tmp_path / "run", recipe, Options(), resumes=True)
    assert (tmp_path / "run" / "bundle" / "model.safetensors").read_bytes() == weights


def test_explicit_learning_rate_is_not_scaled(tmp_path, small_data):
    result = vitrail.finetune("fashion", small_data, steps=1, lr=3e-5, output=tmp_path / "run", settings={"warmup": 0})
    assert [event["learning_rate"] for event in result.history if event["event"] == "step"] == [3e-5]
    recipe = find_recipe("auto")
    assert recipe.rate_by_residual
    assert not change_recipe(recipe, ["learning_rate=0.001"]).rate_by_residual
    assert change_recipe(recipe, ["learning_rate=0.001", "rate_by_residual=true"]).rate_by_residual


def test_kept_head_scales_learning_rate_by_a_tenth(tmp_path):
    """If the classes are those of the bundle, no head is fitted that would measure the residual."""
    recipe = find_recipe("auto").replace(minutes=None, steps=1, schedule="constant", warmup=0.0, holdout=0)
    clothes = open_data("fashion-40").splits["test"]
    data = (clothes.images, [vitrail.load("fashion").labels[label] for label in clothes.labels])
    finetune("fashion", data, tmp_path / "run", recipe, Options())
    assert [event["learning_rate"] for event in events(tmp_path / "run", "step")] == [pytest.approx(2e-4)]


def test_zero_head_scales_learning_rate_by_nine_tenths(tmp_path, small_data):
    recipe = find_recipe("auto").replace(minutes=None, steps=1, schedule="constant", warmup=0.0, head="zero")
    finetune("fashion", small_data, tmp_path / "run", recipe, Options())
    assert [event["learning_rate"] for event in events(tmp_path / "run", "step")] == [pytest.approx(2e-3 * 0.9)]


def test_frozen_model_with_trained_head_is_reported_as_linear_head(tmp_path, small_data):
    recipe = find_recipe("auto").replace(minutes=None, steps=1, learning_rate=1e-9, freeze=True)
    finetune("fashion", small_data, tmp_path / "run", recipe, Options())
    provenance = vitrail.load(tmp_path / "run" / "bundle").provenance
    assert provenance["weights"].startswith("linear head on frozen features, trained")
    assert provenance["choice"].startswith("the trained head is kept: ")
    (run,) = compare_runs([tmp_path / "run"]).to_json()["runs"]
    assert run["result"] == "ViT-Fashion/4, linear head on frozen features"


def test_linear_head_is_named_in_card_report_and_runs(tmp_path, small_data, capsys):
    finetune("fashion", small_data, tmp_path / "frozen", find_recipe("frozen"), Options())
    finetune("fashion", small_data, tmp_path / "spoilt", spoil(find_recipe("auto"), steps=1), Options())
    tuned = find_recipe("auto").replace(minutes=None, steps=1, learning_rate=1e-9)
    finetune("fashion", small_data, tmp_path / "tuned", tuned, Options())
    phrase = "linear head on frozen features"
    for name, sentence in (("frozen", f"This model is a {phrase}"), ("spoilt", f"The kept model is the {phrase}")):
        assert f"weights: {phrase}" in (tmp_path / name / "bundle" / "README.md").read_text()
        assert sentence in (tmp_path / name / "report.html").read_text()
    assert f"weights: {phrase}" not in (tmp_path / "tuned" / "bundle" / "README.md").read_text()
    report = (tmp_path / "tuned" / "report.html").read_text()
    assert "Kept model: the fine-tuned model is kept" in report
    assert "on 20 images held out of the training images" in report
    assert "The scores below use the same images that selected the model" in report
    results = {Path(run["folder"]).name: run["result"] for run in compare_runs([tmp_path]).to_json()["runs"]}
    model = "ViT-Fashion/4"
    assert results == {"frozen": f"{model}, {phrase}", "spoilt": f"{model}, {phrase}", "tuned": model}


def spoil(recipe, steps=6):
    """Return a recipe whose steps make the model worse."""
    return recipe.replace(minutes=None, steps=steps, learning_rate=0.5, clip=0.0, schedule="constant", warmup=0.0)


def test_starting_head_is_kept_if_training_is_worse_also_after_resume(tmp_path, small_data, monkeypatch, capsys):
    recipe = spoil(find_recipe("auto"))
    finetune("fashion", small_data, tmp_path / "head", find_recipe("frozen").replace(holdout=recipe.holdout), Options())
    finetune("fashion", small_data, tmp_path / "run", recipe, Options())
    (choice,) = events(tmp_path / "run", "choice")
    evaluations = events(tmp_path / "run", "evaluate")
    assert (choice["kept"], choice["count"]) == ("start", 20)
    assert choice["tuned"] < choice["start"]
    assert [(event["step"], event["accuracy"]) for event in (evaluations[0], evaluations[-1])] == [
        (0, choice["start"]),
        (6, choice["tuned"]),
    ]
    assert f"note: {choice['reason']}" in capsys.readouterr().err
    bundle = vitrail.load(tmp_path / "run" / "bundle")
    assert bundle.provenance["choice"] == choice["reason"]
    assert bundle.provenance["weights"] == "linear head on frozen features"
    page = (tmp_path / "run" / "report.html").read_text()
    before_the_numbers = page.partition('class="numbers"')[0]
    assert (
        f"linear head on frozen features that was fitted before the training in the curves: {choice['reason']}."
        in before_the_numbers
    )
    weights, head = ((tmp_path / name / "bundle" / "model.safetensors").read_bytes() for name in ("run", "head"))
    assert weights == head
    # After a kill or after the end, checkpoints have all data for the choice.
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "collect_damage", lambda trainer, log: trainer.step < 6 or pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            finetune("fashion", small_data, tmp_path / "killed", recipe, Options())
    for _ in range(2):
        finetune("fashion", small_data, tmp_path / "killed", recipe, Options(), resumes=True)
        assert (tmp_path / "killed" / "bundle" / "model.safetensors").read_bytes() == head
    assert [event["step"] for event in events(tmp_path / "killed", "resume")] == [3, 6]
    first, second = events(tmp_path / "killed", "choice")
    assert first == second == choice


def test_tuned_model_is_kept_at_a_tie_or_without_held_out_images(tmp_path, small_data, capsys):
    tiny = find_recipe("auto").replace(minutes=None, steps=1, learning_rate=1e-9)
    for name, recipe, reason in (
        ("tie", tiny, "(a tie)"),
        (
            "none",
            tiny.replace(holdout=0),
            "there are no held-out images to compare it with the linear head on frozen features",
        ),
    ):
        finetune("fashion", small_data, tmp_path / name, recipe, Options())
        (choice,) = events(tmp_path / name, "choice")
        assert choice["kept"] == "tuned"
        assert choice["reason"].endswith(reason)
        assert choice["reason"] in capsys.readouterr().err
        provenance = vitrail.load(tmp_path / name / "bundle").provenance
        assert (provenance["choice"], provenance["weights"]) == (choice["reason"], "running average, decay 0.99")


def test_accurate_starting_head_is_kept_at_a_tie(tmp_path):
    levels = np.random.default_rng(0).integers(0, 40, (40, 28, 28)) + np.repeat([0, 200], 20)[:, None, None]
    data = (levels.astype(np.uint8), ["dark"] * 20 + ["light"] * 20)
    result = vitrail.finetune("fashion", data, steps=1, output=tmp_path / "run")
    (choice,) = events(tmp_path / "run", "choice")
    assert (choice["kept"], choice["start"], choice["tuned"]) == ("start", 1.0, 1.0)
    assert choice["reason"].endswith("(a tie)")
    assert result.bundle.provenance["weights"] == "linear head on frozen features"


class ByLoss(Classify):
    """Objective that compares models by the loss and names its accuracy `share`."""

    watched = watched_name = "share"

    def score(self, images_BCHW, labels_B):
        metrics = super().score(images_BCHW, labels_B)
        return {"loss": metrics["loss"], "share": metrics["accuracy"]}

    def goodness(self, metrics):
        return -metrics["loss"]


def test_objective_goodness_decides_which_model_is_kept(tmp_path, small_data, monkeypatch):
    monkeypatch.setattr("vitrail.training.objectives.classify.ByLoss", ByLoss, raising=False)
    monkeypatch.setitem(OBJECTIVES._built_ins, "by-loss", "vitrail.training.objectives.classify:ByLoss")
    recipe = spoil(find_recipe("auto").replace(objective="by-loss"), steps=3)
    for resumes in (False, True):
        finetune("fashion", small_data, tmp_path / "run", recipe, Options(), resumes=resumes)
    first, again = events(tmp_path / "run", "choice")
    assert first == again
    assert (first["kept"], first["start"]) == ("start", -events(tmp_path / "run", "evaluate")[0]["loss"])
    assert first["reason"].startswith("the linear head on frozen features is kept: share ")


def test_seconds_of_run_are_summed_over_interruptions(tmp_path, small_data):
    recipe = find_recipe("auto").replace(minutes=None, steps=1)
    finetune("fashion", small_data, tmp_path / "run", recipe, Options())
    folder = tmp_path / "run" / "checkpoints" / "step-000000001"
    forge(folder, lambda state: {**state, "seconds": state["seconds"] + 1000})
    finetune("fashion", small_data, tmp_path / "run", recipe, Options(), resumes=True)
    first, second = (event["seconds"] for event in events(tmp_path / "run", "end"))
    assert events(tmp_path / "run", "probe")[0]["seconds"] <= first + 0.05
    assert 1000 < second < 1000 + first + 60
    assert vitrail.load(tmp_path / "run" / "bundle").provenance["seconds"] == second


def test_classes_of_bundle_keep_trained_head(tmp_path, capsys):
    clothes = open_data("fashion-40")
    np.savez(
        tmp_path / "clothes.npz",
        images=clothes.splits["test"].images,
        labels=clothes.splits["test"].labels,
        classes=np.array(clothes.labels),
    )
    recipe = Recipe(steps=1, learning_rate=1e-9, batch=8, holdout=0, head="probe")
    finetune("fashion", str(tmp_path / "clothes.npz"), tmp_path / "run", recipe, Options())
    assert "its head is kept" in capsys.readouterr().err
    before, after = (vitrail.load(path).model.head.weight for path in ("fashion", tmp_path / "run" / "bundle"))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["ResNet-Pico", "Mixer-Pico/2", "LSTM-Pico/2", "MLP-Pico", "iGPT-Micro"])
def test_auto_recipe_works_for_every_family(tmp_path, name, capsys):
    model = redraw(vitrail.create(name, channels=1, classes=2, resolution=8), std=0.05)
    eye = Preprocess(resolution=8, mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    vitrail.save(vitrail.Bundle(model=model, preprocess=eye), tmp_path / "bundle")
    recipe = find_recipe("auto").with_length(epochs=None, steps=1, minutes=None)
    finetune(tmp_path / "bundle", "digits", tmp_path / "run", recipe, Options())
    output = capsys.readouterr().err
    assert ("not one sequence of blocks" in output) == (name in ("ResNet-Pico", "LSTM-Pico/2", "MLP-Pico"))


def test_existing_output_is_rejected_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "taken.txt").write_text("mine")
    monkeypatch.setattr("vitrail.training.finetune.extract_features", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(VitrailError, match="Output must not exist yet"):
        finetune("fashion", "digits", tmp_path, find_recipe("frozen"), Options())


def test_corrupt_image_is_recorded_even_without_training(tmp_path):
    for index, pixels in enumerate(open_data("fashion-40").splits["test"].images[:12]):
        folder = tmp_path / "data" / "train" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[..., 0]).save(folder / f"{index}.png")
    (tmp_path / "data" / "train" / "a" / "0.png").write_bytes(b"no picture")
    recipe = find_recipe("frozen").replace(on_damage="skip", holdout=0.2)
    finetune("fashion", str(tmp_path / "data"), tmp_path / "run", recipe, Options(seed=1))
    assert len(vitrail.load(tmp_path / "run" / "bundle").provenance["damaged"]["files"]) == 1


def test_finetune_rejects_unsupported_recipes(tmp_path):
    for recipe, message in (
        (Recipe(steps=1, objective="masked"), r"an objective that learns classes \(classify, multilabel\), got masked"),
        (Recipe(steps=1, model={"width": 32}), "got model.width"),
        (Recipe(steps=1, head_bias=-5.0), "Head bias must be 0 in fine-tuning"),
    ):
        with pytest.raises(UsageError, match=message):
            finetune("fashion", "digits", tmp_path / "run", recipe, Options())
    with pytest.raises(UsageError, match="Head must be zero when training from scratch, got probe"):
        train("digits", "ViT-Pico/2", tmp_path / "run", Recipe(steps=1, head="probe"), Options())
    with pytest.raises(UsageError, match="Steps must be"):
        Recipe(steps=0)
    assert not (tmp_path / "run").exists()
