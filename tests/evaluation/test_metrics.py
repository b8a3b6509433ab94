"""Scores, matching of classes, and the commands `evaluate` and `predict`."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.test_cli import FIXTURE
from vitrail.cli import main
from vitrail.core.errors import UsageError
from vitrail.core.intervals import wilson_interval
from vitrail.data.loader import Loader
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.labels import match_labels
from vitrail.evaluation.metrics import calibration_error, score_classes
from vitrail.evaluation.split_predictions import SplitPredictions, predict_split


def test_scores_equal_scikit_learn():
    from sklearn import metrics

    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(8), 500)
    labels = rng.integers(0, 8, 500)
    labels[:200] = probabilities[:200].argmax(1)
    scores = score_classes(probabilities, labels, tuple("abcdefgh"))
    predicted = probabilities.argmax(1)
    assert scores["accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    assert scores["top5"] == pytest.approx(metrics.top_k_accuracy_score(labels, probabilities, k=5))
    assert scores["negative_log_likelihood"] == pytest.approx(metrics.log_loss(labels, probabilities))
    np.testing.assert_array_equal(scores["confusion"], metrics.confusion_matrix(labels, predicted))
    recall = metrics.recall_score(labels, predicted, average=None)
    assert [row["accuracy"] for row in scores["per_class"]] == pytest.approx(recall)


@pytest.mark.parametrize("seed", range(5))
def test_precision_recall_and_f1_equal_scikit_learn(seed):
    """Of 12 classes, the last two have no images, the last three are never predicted, and one is only predicted."""
    from sklearn.metrics import precision_recall_fscore_support

    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(12), 60)
    probabilities[:, 9:] = 0
    labels = rng.integers(1, 10, 60)
    probabilities[0, 0] = 1
    predicted = probabilities.argmax(1)
    scores = score_classes(probabilities, labels, tuple("abcdefghijkl"))
    used = sorted({*labels.tolist(), *predicted.tolist()})
    assert used == list(range(10))
    names = ("precision", "recall", "f1")
    *expected, _ = precision_recall_fscore_support(labels, predicted, zero_division=0)
    for name, values in zip(names, expected, strict=True):
        assert [scores["per_class"][index][name] for index in used] == pytest.approx(values)
    *expected, _ = precision_recall_fscore_support(labels, predicted, zero_division=0, average="macro")
    assert [scores["macro"][name] for name in names] == pytest.approx(expected)
    assert [scores["per_class"][index][name] for index in (10, 11) for name in names] == [None] * 6
    assert (scores["per_class"][0]["recall"], scores["per_class"][9]["precision"]) == (0, 0)


def test_top5_breaks_ties_by_class_order_and_missing_class_has_no_accuracy():
    scores = score_classes(np.full((4, 6), 1 / 6), np.array([0, 1, 4, 5]), tuple("abcdef"))
    assert (scores["accuracy"], scores["top5"]) == (0.25, 0.75)
    missing = {"label": "c", "count": 0, "right": 0, "accuracy": None, "interval": None}
    assert scores["per_class"][2] == missing | {"precision": None, "recall": None, "f1": None}


def test_wilson_interval_equals_published_values():
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)  # Newcombe 1998, Table I
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(20, 20)[1] == 1.0


def test_calibration_error_of_simple_cases():
    confidence = np.repeat([0.95, 0.55], 100)
    assert calibration_error(confidence, np.arange(200) % 100 < np.where(confidence > 0.9, 95, 55)) == pytest.approx(
        0, abs=1e-9
    )
    assert calibration_error(np.full(10, 1.0), np.arange(10) < 5) == pytest.approx(0.5)


def test_classes_are_matched_by_name_otherwise_by_number():
    indices, matching = match_labels(("cat", "dog", "emu"), 3, ("dog", "cat"))
    assert (indices.tolist(), matching) == ([1, 0], "by name")
    indices, matching = match_labels(None, 1000, ("001", "7"))
    assert (indices.tolist(), matching) == ([1, 7], "as class numbers")
    indices, matching = match_labels(("tench", "goldfish"), 2, ("0", "1"))
    assert matching == "as class numbers"
    indices, matching = match_labels(("1", "0"), 2, ("0", "1"))
    assert (indices.tolist(), matching) == ([1, 0], "by name")
    for model_labels, data_labels in ((("cat",), ("cat", "eel")), (None, ("cat",)), (None, ("7",))):
        with pytest.raises(UsageError, match="Classes of the data"):
            match_labels(model_labels, 1 if model_labels else 5, data_labels)


def test_ranks_together_predict_every_image_once():
    bundle = vitrail.Bundle(
        model=vitrail.create("ViT-Pico/2"), preprocess=vitrail.Preprocess(resolution=8, mean=(0.5,), std=(0.5,))
    )
    split = open_data("digits").splits["test"]
    single = predict_split(bundle.model, Loader(split, bundle.preprocess, batch=50, shuffle=False))
    rank_predictions = [
        predict_split(bundle.model, Loader(split, bundle.preprocess, batch=50, shuffle=False, rank=rank, ranks=3))
        for rank in range(3)
    ]
    joined = SplitPredictions.join(rank_predictions)
    np.testing.assert_array_equal(joined.indices, np.arange(360))
    np.testing.assert_array_equal(joined.labels, single.labels)
    np.testing.assert_allclose(joined.probabilities, single.probabilities, atol=1e-6)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for index, name in enumerate(("a.png", "b.png", "more/c.png")):
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (20, 30), dtype=np.uint8)).save(folder / name)
    return folder


def test_predict_accepts_files_and_folders(call, images):
    result = call("predict", FIXTURE, images, "--json", "--top-k", "2")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["file"] for row in rows] == [str(images / name) for name in ("a.png", "b.png", "more/c.png")]
    expected = vitrail.Classifier(FIXTURE).predict([images / "b.png"], top_k=2)[0]
    assert [prediction["label"] for prediction in rows[1]["predictions"]] == [
        prediction["label"] for prediction in expected
    ]
    assert rows[1]["predictions"][0]["score"] == pytest.approx(expected[0]["score"], abs=1e-6)
    table = call("predict", FIXTURE, images / "a.png").stdout
    assert "a.png" in table
    assert rows[0]["predictions"][0]["label"] in table


def test_predict_reports_unreadable_image_and_continues(call, images):
    (images / "b.png").write_bytes(b"not a picture")
    result = call("predict", FIXTURE, images, "--json")
    assert result.returncode == 1
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert ["error" in row for row in rows] == [False, True, False]
    assert "b.png" in rows[1]["error"]
    assert "error" in call("predict", FIXTURE, images).stdout


def test_wrong_use_of_predict_evaluate_and_train_gives_one_line_error(images, monkeypatch, capsys):
    monkeypatch.chdir(images)
    for arguments in (
        ["predict", FIXTURE, images / "missing.png"],
        ["predict", FIXTURE],
        ["predict", images, images / "a.png"],
        ["predict", FIXTURE, images / "a.png", "--top-k", "0"],
        ["evaluate", FIXTURE, images],
        ["evaluate", FIXTURE, "digits"],
        ["evaluate", FIXTURE, "digits", "--split", "tset"],
        ["evaluate", FIXTURE, "digits", "--protocol", "magic"],
        ["train", "digits", "--model", "ViT-Pico", "--output", "x", "--epochs", "1"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--epochs", "1", "--recipe", "none"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--epochs", "1", "--steps", "3"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--set", "batch=x"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--device", "quantum"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--device", "meta"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--set", "augment=strong"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--set", "model.classes=5"],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--set", "preprocess.resolution=16"],
        [
            "train",
            "digits",
            "--model",
            "ViT-Pico/2",
            "--output",
            "x",
            "--objective",
            "masked",
            "--set",
            "model.patch=8",
        ],
        ["train", "digits", "--model", "ViT-Pico/2", "--output", "x", "--objective", "next-pixel"],
        ["train", "nothing", "--model", "ViT-Pico/2", "--output", "x"],
        ["train", "digits", "--model", "ViT-B/16", "--output", "x", "--set", "model.resolution=9"],
    ):
        with pytest.raises(SystemExit) as exit_info:
            main([str(argument) for argument in arguments])
        stderr = capsys.readouterr().err
        assert exit_info.value.code == 2, (arguments, stderr)
        assert len(stderr.strip().splitlines()) == 1, stderr
        assert stderr.startswith("vitrail: ")
    assert not (images / "x").exists()


def test_note_if_classes_with_different_names_are_matched_by_number(call):
    for flag in ([], ["--json"]):
        result = call("evaluate", "fashion", "digits", *flag)
        assert result.returncode == 0
        assert result.stderr == (
            "note: names of classes differ, so they are matched by index: '0' of the data is 'Ankle boot' of the bundle"
            " (to match by name, give the data the bundle's names)\n"
        )
    assert json.loads(result.stdout)["labels_matched"] == "as class numbers"
    assert call("evaluate", "fashion", "fashion-40").stderr == ""


def test_class_of_five_thousand_digits_is_a_name():
    with pytest.raises(UsageError, match="numbers below 10"):
        match_labels(None, 10, ["1" * 5000])


def test_accuracy_of_deit_on_real_photos(call, shared, tmp_path):
    """Folder names are class numbers. Every seventh photo is evaluated; the slow test_parity.py evaluates all 500."""
    from safetensors.torch import load_file

    model = vitrail.create("ViT-Ti/16")
    model.load_state_dict(load_file(shared / "deit-ti16" / "model.safetensors"))
    vitrail.save(vitrail.Bundle(model=model.eval(), preprocess=vitrail.Preprocess()), tmp_path / "deit")
    photos = sorted((shared / "imagenet-val-500").rglob("*.JPEG"))[::7]
    (tmp_path / "photos.csv").write_text("\n".join(f"{path},{int(path.parent.name)}" for path in photos))
    scores = json.loads(call("evaluate", tmp_path / "deit", tmp_path / "photos.csv", "--json").stdout)
    assert scores["labels_matched"] == "as class numbers"
    assert scores["count"] == len(photos)
    assert 0.6 < scores["accuracy"] < 0.85
    assert scores["accuracy_interval"][0] < scores["accuracy"] < scores["accuracy_interval"][1]


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory):
    """Noise images in class folders without splits, and a run that was trained on them with seed 3."""
    folder = tmp_path_factory.mktemp("unsplit")
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / "photos" / label).mkdir(parents=True)
        for index in range(20):
            noise = rng.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(noise).save(folder / "photos" / label / f"{index}.png")
    vitrail.train(folder / "photos", "ViT-Pico/2", steps=2, seed=3, output=folder / "run", settings={"holdout": 0.25})
    return folder / "photos", folder / "run"


def test_evaluate_on_training_data_uses_held_out_images(call, unsplit):
    photos, run_folder = unsplit
    result = call("evaluate", run_folder / "bundle", photos, "--json")
    scores, training_scores = json.loads(result.stdout), vitrail.load(run_folder / "bundle").provenance["scores"]
    assert (scores["split"], scores["count"], scores["trained_on"]) == ("held-out", 10, False)
    assert scores["ece"] == pytest.approx(training_scores["ece"], abs=1e-6)
    (note,) = scores["notes"]
    assert "only the 10 images held out are evaluated (--split all: every image)" in note
    assert result.stderr == f"note: {note}\n"
    result = call("evaluate", run_folder / "bundle", photos, "--json", "--split", "held-out")
    assert (json.loads(result.stdout)["count"], result.stderr) == (10, "")


def test_evaluate_on_training_images_gives_note(call, unsplit):
    photos, run_folder = unsplit
    result = call("evaluate", run_folder / "bundle", photos, "--json", "--split", "all")
    scores = json.loads(result.stdout)
    assert (scores["split"], scores["count"], scores["trained_on"]) == ("all", 40, True)
    assert result.stderr.startswith("note: the bundle was trained on these images")
    assert len(result.stderr.splitlines()) == 1
    evaluation = vitrail.evaluate(run_folder / "bundle", photos, "all")
    assert evaluation.trained_on
    assert repr(evaluation).endswith(", training images)")
    assert not vitrail.evaluate(run_folder / "bundle", photos).trained_on


def test_evaluate_recognises_copied_and_changed_training_data(unsplit, tmp_path):
    photos, run_folder = unsplit
    shutil.copytree(photos, tmp_path / "copy")
    assert vitrail.evaluate(run_folder / "bundle", tmp_path / "copy").split == "held-out"
    (tmp_path / "copy" / "cat" / "0.png").unlink()
    evaluation = vitrail.evaluate(run_folder / "bundle", tmp_path / "copy")
    assert (evaluation.split, evaluation.count, evaluation.trained_on, evaluation.scores["notes"]) == (
        "all",
        39,
        False,
        [],
    )
    # The same folder with one photo fewer: most images are still training images.
    bundle = dataclasses.replace(
        vitrail.load(run_folder / "bundle"), provenance={"data": f"{tmp_path / 'copy'}: 36 training images"}
    )
    (note,) = vitrail.evaluate(bundle, tmp_path / "copy").scores["notes"]
    assert "as it was before: some of these images may be training images" in note
    with pytest.raises(UsageError, match="Split held-out must be used with the data"):
        vitrail.evaluate(run_folder / "bundle", tmp_path / "copy", "held-out")


def test_evaluate_on_train_folder_gives_note(unsplit, tmp_path):
    photos, _ = unsplit
    for split in ("train", "val"):
        shutil.copytree(photos, tmp_path / "photos" / split)
    for image in (tmp_path / "photos" / "val").glob("*/1*.png"):
        image.unlink()
    vitrail.train(tmp_path / "photos", "ViT-Pico/2", steps=1, output=tmp_path / "run")
    evaluation = vitrail.evaluate(tmp_path / "run" / "bundle", tmp_path / "photos" / "train")
    assert (evaluation.split, evaluation.trained_on) == ("all", True)
    assert evaluation.scores["notes"][0].startswith("the bundle was trained on these images")
    evaluation = vitrail.evaluate(tmp_path / "run" / "bundle", tmp_path / "photos" / "val")
    assert (evaluation.split, evaluation.trained_on, evaluation.scores["notes"]) == ("all", False, [])


def test_evaluate_without_stored_holdout_gives_note(unsplit):
    photos, run_folder = unsplit
    bundle = vitrail.load(run_folder / "bundle")
    for holdout in ({}, {"holdout": 0.0}, {"holdout": "most"}):
        provenance = {name: value for name, value in bundle.provenance.items() if name != "holdout"} | holdout
        evaluation = vitrail.evaluate(dataclasses.replace(bundle, provenance=provenance), photos)
        assert (evaluation.split, evaluation.count, evaluation.trained_on) == ("all", 40, True)
        assert evaluation.scores["notes"][0].startswith("the bundle was trained on these images")


def test_feature_protocols_use_images_held_out_of_training(unsplit):
    photos, run_folder = unsplit
    bundle = run_folder / "bundle"
    evaluation = vitrail.evaluate(bundle, photos, protocol="knn")
    assert (evaluation.split, evaluation.count, evaluation.trained_on, evaluation.scores["train_count"]) == (
        "held-out",
        10,
        False,
        30,
    )
    assert "only the 10 images held out are evaluated" in evaluation.scores["notes"][0]
    evaluation = vitrail.evaluate(bundle, photos, protocol="probe", seed=0, penalty=1.0)
    assert (evaluation.split, evaluation.count, evaluation.trained_on) == ("held-out", 4, True)
    assert evaluation.scores["notes"][0].startswith("the bundle was trained on these images")
    evaluation = vitrail.evaluate("fashion", photos, protocol="knn")
    assert (evaluation.count, evaluation.trained_on, evaluation.scores["notes"]) == (4, False, [])


def test_against_uses_same_images_and_names_bundle_trained_on_them(call, unsplit, tmp_path):
    photos, run_folder = unsplit
    vitrail.train(photos, "ViT-Pico/2", steps=1, seed=4, output=tmp_path / "other")
    result = call("evaluate", run_folder / "bundle", photos, "--json", "--against", tmp_path / "other" / "bundle")
    scores = json.loads(result.stdout)
    assert (scores["split"], scores["count"], scores["trained_on"]) == ("held-out", 10, False)
    assert [f"{tmp_path / 'other' / 'bundle'} was trained on these images" in note for note in scores["notes"]] == [
        False,
        True,
    ]
    result = call("evaluate", run_folder / "bundle", photos, "--json", "--against", run_folder / "bundle")
    assert len(json.loads(result.stdout)["notes"]) == 1
