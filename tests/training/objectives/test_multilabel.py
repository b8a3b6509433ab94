"""Multi-label classification: data, objective, scores, bundles and predictions."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, precision_score, recall_score

import vitrail
from tests.bundles.test_bundle import remake_manifest
from tests.paths import FIXTURES
from tests.training.runs import finetune, train
from vitrail.bundles.decision import SINGLE_LABEL, MultiLabel
from vitrail.bundles.folder import DECISION_RULE_FILE
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.data.dataset import sample_held_out
from vitrail.data.doctor import find_problems
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.metrics import average_precision, best_thresholds, score_labels
from vitrail.evaluation.protocols import evaluate
from vitrail.training.options import Options
from vitrail.training.recipe import change_recipe, find_recipe

FIXTURE = FIXTURES / "bundle-format-2"
LABELS = ("bottom", "left", "right", "top")


def write_toys(folder: Path, count: int = 160) -> Path:
    """Write images of 8 x 8 pixels with two of four bright edges, which are their labels. Return the CSV file."""
    rng = np.random.default_rng(3)
    lines = ["file,labels,split"]
    for number in range(count):
        chosen = rng.choice(4, 2, replace=False)
        pixels = rng.integers(0, 60, (8, 8), np.uint8)
        for label in chosen:
            pixels[{0: np.s_[6:], 1: np.s_[:, :2], 2: np.s_[:, 6:], 3: np.s_[:2]}[int(label)]] += 120
        Image.fromarray(pixels).save(folder / f"{number}.png")
        names = ";".join(LABELS[label] for label in chosen)
        lines.append(f"{number}.png,{names},{'test' if number % 4 == 0 else 'train'}")
    (folder / "toys.csv").write_text("\n".join(lines) + "\n")
    return folder / "toys.csv"


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return write_toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def run(toys, tmp_path_factory):
    changes = ["objective=multilabel", "batch=30", "epochs=12", "learning_rate=0.003", "model.resolution=8"]
    changes += ['augment.crop="none"', 'augment.flip="none"']
    recipe = change_recipe(find_recipe("small"), changes)
    return train(str(toys), "ViT-Pico/2", tmp_path_factory.mktemp("run") / "run", recipe, Options(), quiet=True)


def test_average_precision_equals_scikit_learn():
    rng = np.random.default_rng(0)
    for trial in range(50):
        scores = rng.integers(0, 8 if trial % 2 else 10**6, (40, 5)) / 8
        truth = (rng.random((40, 5)) < 0.3).astype(np.uint8)
        truth[0], truth[1] = 1, 0
        ours = score_labels(scores, truth, tuple("abcde"))
        theirs = average_precision_score(truth, scores, average=None)
        np.testing.assert_allclose(list(ours["average_precision"].values()), theirs, rtol=1e-12)
        assert ours["map"] == pytest.approx(average_precision_score(truth, scores), rel=1e-12)
    assert average_precision(np.ones(3), np.zeros(3)) is None


def test_f1_of_labels_equals_scikit_learn():
    rng = np.random.default_rng(2)
    scores, truth = rng.random((40, 5)), (rng.random((40, 5)) < 0.3).astype(np.uint8)
    scores[:, 4], truth[:, 4] = 0.0, 0  # neither predicted nor there: left out of the mean
    scores[:, 3] = 0.0
    ours = score_labels(scores, truth, tuple("abcde"), (0.5,) * 5)
    used = truth[:, :4], scores[:, :4] >= 0.5
    assert [row["f1"] for row in ours["per_class"][:4]] == pytest.approx(f1_score(*used, average=None))
    assert ours["per_class"][4]["f1"] is None
    for name, score in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
        assert ours["macro"][name] == pytest.approx(score(*used, average="macro", zero_division=0))


def test_best_thresholds_maximise_f1():
    rng = np.random.default_rng(1)
    scores, truth = rng.random((60, 3)).round(2), (rng.random((60, 3)) < 0.4).astype(np.uint8)
    for column, (threshold, targets) in enumerate(zip(best_thresholds(scores, truth), truth.T, strict=True)):

        def f1(minimum, column=column, targets=targets):
            is_predicted = scores[:, column] >= minimum
            return 2 * (is_predicted & (targets > 0)).sum() / (is_predicted.sum() + targets.sum())

        assert f1(threshold) == max(f1(minimum) for minimum in np.unique(scores))
    assert best_thresholds(np.array([[0.2], [0.9]]), np.array([[0], [1]])) == (pytest.approx(0.55),)
    assert best_thresholds(np.ones((2, 2)), np.array([[0, 1], [0, 1]])) == (0.5, 0.5)


def test_multilabel_csv_is_read(tmp_path):
    write_toys(tmp_path, 4)
    (tmp_path / "a.csv").write_text("labels,file\nb; a ;b,0.png\n,1.png\nc,2.png\n")
    dataset = open_data(tmp_path / "a.csv")
    assert dataset.labels == ("a", "b", "c")
    assert dataset.first_split.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert dataset.notes == ("read as images with several labels: 1 of 3 on average",)
    files_by_problem = {finding.kind: finding.files for finding in find_problems(dataset)}
    assert files_by_problem["unlabelled"] == (str(tmp_path / "1.png"),)
    for text, reason in (
        ("file,labels\n1.png,;\n", "has no label in any line"),
        ("labels\na;b\n", "CSV header must have file and label"),
        ("file,labels\n,a\n", "Line 2 .* must be file,label"),
        ("file,labels\n\x00\xff", "must have 2 cells"),
    ):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(VitrailError, match=reason):
            open_data(tmp_path / "b.csv")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("file,labels\n0.png,cat,train\n", "Line 2 .* must have at most 2 cells, got '0.png,cat,train'"),
        ("file,labels\n0.png,cat,,dog\n", "Line 2 .* must have at most 2 cells"),
        ("0.png,cat,train,dog\n", "Line 1 .* must have at most 3 cells"),
        ("file,labels,labels\n0.png,cat,dog\n", "CSV header must name file, .* once, got file, labels, labels in"),
        ("file,path,labels\n0.png,1.png,dog\n", "CSV header must name file, .* once"),
        ("file,label,labels\n0.png,cat,dog\n", "CSV header must name file, .* once"),
        ("file,label,split,split\n0.png,cat,train,test\n", "CSV header must name file, .* once"),
        ("file,labels\n0.png,cat\n1.png,a\n0.png,dog\n", "Line 4 .* must label '0.png' as an earlier line does"),
        ("file,labels\n0.png,cat\n1.png", "Line 3 .* must have 2 cells, as its header does, got '1.png'"),
        ("file,label,splat,split\n0.png,cat,train\n", "Line 2 .* must have 4 cells"),
        (
            "file,label,set\n0.png,a,train\n1.png,b,test\n",
            "CSV header must call the column of test, train split, got 'set'",
        ),
        ("0.png,cat\n0.png,dog\n", "Line 2 .* must label '0.png' as an earlier line does, got 'dog'"),
    ],
)
def test_inconsistent_csv_is_rejected(tmp_path, text, reason):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(VitrailError, match=reason) as caught:
        open_data(tmp_path / "a.csv")
    assert "\n" not in str(caught.value)


def test_held_out_sample_leaves_each_label_in_training():
    labels = np.array([[1, 0], [1, 0], [1, 0], [1, 1]] + [[1, 0]] * 16, np.uint8)
    for seed in range(20):
        held_out = sample_held_out(labels, 0.5, seed)
        assert held_out.sum() == 10
        assert not held_out[3]


def test_multilabel_training_reaches_high_map(run, toys):
    assert run.scores["map"] >= 0.95
    assert run.scores["count"] == 40
    scores = evaluate(run.folder / "bundle", str(toys))
    assert scores["map"] == pytest.approx(run.scores["map"], abs=1e-9)
    assert list(scores["average_precision"]) == list(LABELS)
    metrics = {"average_precision", "precision", "recall", "f1"}
    assert scores["per_class"][0].keys() == {"label", "count", "threshold", *metrics}
    assert scores["f1"] > 0.8
    report = (run.folder / "report.html").read_text()
    assert "mAP on 40" in report
    assert "Average precision by label" in report


def test_bundle_stores_multilabel_decision_rule(run, tmp_path):
    bundle = vitrail.load(run.folder / "bundle")
    assert isinstance(bundle.answer, MultiLabel)
    assert len(bundle.answer.thresholds) == 4
    assert json.loads((run.folder / "bundle" / "config.json").read_text())["format"] == 2
    vitrail.save(bundle, tmp_path / "copy")
    for name in (DECISION_RULE_FILE, "config.json", "model.safetensors"):
        assert (tmp_path / "copy" / name).read_bytes() == (run.folder / "bundle" / name).read_bytes()
    (tmp_path / "copy" / DECISION_RULE_FILE).write_text("{}")
    with pytest.raises(CorruptFileError, match=r"answer.json' is corrupt: its checksum"):
        vitrail.load(tmp_path / "copy")
    (tmp_path / "copy" / DECISION_RULE_FILE).unlink()
    with pytest.raises(CorruptFileError, match=r"answer.json' is missing"):
        vitrail.load(tmp_path / "copy")


def test_bundle_format_2_fixture_loads():
    bundle = vitrail.load(FIXTURE)
    assert bundle.answer == MultiLabel(thresholds=(0.25, 0.5, 0.75))
    assert bundle.labels == ("cat", "dog", "person")
    assert vitrail.load("fashion").answer == SINGLE_LABEL


@pytest.mark.parametrize("engine", ["torch", pytest.param("onnx", marks=pytest.mark.slow)])
def test_predict_returns_labels_above_thresholds(run, toys, call, engine, tmp_path):
    if engine == "onnx":
        pytest.importorskip("onnxruntime")
    bundle, image = str(run.folder / "bundle"), str(toys.parent / "4.png")
    classifier = vitrail.Classifier(bundle, engine=engine)
    (predictions,) = classifier.predict([image], threshold=0)
    assert [row["score"] for row in predictions] == sorted((row["score"] for row in predictions), reverse=True)
    assert len(predictions) == 4
    (chosen,) = classifier.predict([image])
    thresholds = dict(zip(LABELS, vitrail.load(bundle).answer.thresholds, strict=True))
    assert list(chosen) == [row for row in predictions if row["score"] >= thresholds[row["label"]]]
    (best,) = classifier.predict([image], threshold=0, top_k=1)
    assert list(best) == predictions[:1]
    assert [list(prediction) for prediction in classifier.predict([image], threshold=1)] == [[]]
    if engine == "torch":
        done = call("predict", bundle, image, "--threshold", "1")
        assert done.stdout == f"{image}  (no label)\n"
        document = json.loads(call("predict", bundle, image, "--json").stdout)
        assert [row["label"] for row in document["predictions"]] == [row["label"] for row in chosen]
        assert call("predict", bundle, image, "--threshold", "2").stderr.startswith("vitrail: Threshold must be")


def test_evaluate_and_doctor_accept_multilabel_data(run, toys, call):
    done = call("evaluate", str(run.folder / "bundle"), str(toys))
    assert done.stderr == "note: read as images with several labels: 2 of 4 on average\n"
    assert done.stdout.splitlines()[1].startswith("mAP")
    assert call("doctor", str(toys)).returncode == 0
    evaluation = vitrail.evaluate(run.folder / "bundle", str(toys))
    assert repr(evaluation) == f"Evaluation(test mAP {evaluation.map:.1%}, 40 images)"
    assert len(vitrail.predict(run.folder / "bundle", str(toys.parent / "4.png"), threshold=0)[0].classes) == 4


def test_unsupported_multilabel_commands_raise_one_line_errors(run, toys, call, tmp_path):
    bundle, data = str(run.folder / "bundle"), str(toys)
    training = ["--model", "ViT-Pico/2", "--output", str(tmp_path / "z"), "--epochs", "1"]
    for arguments, reason in (
        (
            ("predict", "fashion", data, "--threshold", "0.5"),
            "Threshold must be used with a bundle that predicts several labels",
        ),
        (("evaluate", "fashion", data), "Classes of the data must be among|must have data with one class for each"),
        (
            ("evaluate", bundle, data, "--output", str(tmp_path / "x.csv")),
            "--output, --page and --against must be used with a bundle that predicts one class",
        ),
        (
            ("predict", bundle, str(toys.parent), "--sort", "uncertain"),
            "--output, --page and --sort must be used with a bundle that predicts one class",
        ),
        (("evaluate", bundle, data, "--protocol", "knn"), "Evaluating features must have data with one class for each"),
        (
            ("compare", "digits", "--bundles", bundle, "--output", str(tmp_path / "x")),
            "A profile must be used with a bundle that predicts one class",
        ),
        (("compare", data, "--output", str(tmp_path / "y")), "A comparison must have data with one class for each"),
        (
            ("train", data, *training),
            "Objective must be multilabel for data with several labels per image, got classify",
        ),
        (
            ("train", "digits", *training, "--objective", "multilabel"),
            "Objective multilabel must have data with several labels per image",
        ),
        (
            ("train", data, *training, "--objective", "multilabel", "--per-class", "3"),
            "Training on some images of each class must have data with one class",
        ),
    ):
        done = call(*arguments)
        assert done.returncode == 2, done
        assert done.stderr.count("\n") == 1
        assert any(part in done.stderr for part in reason.split("|")), done.stderr


def test_inspect_shows_multilabel_predictions(run, toys, call, tmp_path):
    images = [str(toys.parent / name) for name in ("0.png", "4.png")]
    done = call("inspect", str(run.folder / "bundle"), *images, "--evidence", "--output", str(tmp_path / "page"))
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "page" / "inspect.json").read_text())
    (expected,) = vitrail.Classifier(run.folder / "bundle").predict(images[:1], threshold=0)
    predictions = document["pictures"][0]["predictions"]
    assert [row["label"] for row in predictions] == [row["label"] for row in expected]
    assert [row["score"] for row in predictions] == pytest.approx([row["score"] for row in expected], abs=1e-5)


def test_finetune_supports_multilabel_data(run, toys, tmp_path):
    recipe = change_recipe(find_recipe("frozen").replace(preprocess={}), ["objective=multilabel"])
    tuned = finetune("fashion", str(toys), tmp_path / "run", recipe, Options(), quiet=True)
    assert tuned.scores["map"] > 0.7
    assert "has mAP" in tuned.bundle.provenance["finetuned_from"]["changes"][-1]
    again = finetune(run.folder / "bundle", str(toys), tmp_path / "again", recipe, Options(), quiet=True)
    assert again.scores["map"] == pytest.approx(run.scores["map"], abs=1e-6)


def test_invalid_thresholds_are_rejected(run):
    bundle = vitrail.load(run.folder / "bundle")
    with pytest.raises(UsageError, match="Thresholds must be one for each of the model's 4 classes, got 1"):
        vitrail.Bundle(model=bundle.model, preprocess=bundle.preprocess, answer=MultiLabel(thresholds=(0.5,)))
    for thresholds in ((2,), (1.0000000005,), "x", ("a",), (float("nan"),)):
        with pytest.raises(UsageError, match="Thresholds must be"):
            MultiLabel(thresholds=thresholds)


def test_other_decision_rule_changes_fingerprint_and_drops_scores(run):
    bundle = vitrail.load(run.folder / "bundle")
    assert "scores" in bundle.provenance
    rules = (MultiLabel(thresholds=(0.5,) * 4), SINGLE_LABEL)
    changed_bundles = [dataclasses.replace(bundle, answer=rule) for rule in rules]
    assert len({each.fingerprint() for each in (bundle, *changed_bundles)}) == 3
    assert not any("scores" in each.provenance for each in changed_bundles)
    assert "scores" in dataclasses.replace(bundle, answer=MultiLabel(thresholds=bundle.answer.thresholds)).provenance


@pytest.mark.parametrize("document", [{"kind": [1]}, {"kind": {}}, {"kind": None}, [], {"kind": "class", "x": 1}])
def test_invalid_decision_rule_raises_corrupt_file_error(tmp_path, document):
    shutil.copytree(FIXTURE, tmp_path / "bundle")
    (tmp_path / "bundle" / DECISION_RULE_FILE).write_text(json.dumps(document))
    remake_manifest(tmp_path / "bundle")
    with pytest.raises(CorruptFileError, match=r"is not a valid bundle: a document has an invalid structure \("):
        vitrail.load(tmp_path / "bundle")


def test_format_1_with_decision_rule_is_rejected(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "bundle")
    config = tmp_path / "bundle" / "config.json"
    config.write_text(config.read_text().replace('"format": 2', '"format": 1'))
    remake_manifest(tmp_path / "bundle")
    with pytest.raises(CorruptFileError, match=r"answer.json' must not be in a bundle of format 1"):
        vitrail.load(tmp_path / "bundle")


def test_conversion_to_timm_keeps_decision_rule_with_note(run, call, tmp_path):
    done = call("convert", str(run.folder / "bundle"), str(tmp_path / "timm"), "--to", "timm", "--no-verify")
    assert "note: timm cannot store that the model predicts several labels: apply a sigmoid\n" in done.stderr
    assert call("convert", str(tmp_path / "timm"), str(tmp_path / "back"), "--no-verify").returncode == 0
    assert vitrail.load(tmp_path / "back").answer == vitrail.load(run.folder / "bundle").answer
