"""Corrections of labels: matching of lines to images, errors, and runs that use them."""

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import vitrail
from vitrail.core.errors import UsageError
from vitrail.data.corrections import correct_labels
from vitrail.data.sources.registry import CorrectedData, data_arguments, open_data
from vitrail.faces.people import split_people

NAMES = ("a b#1%.png", "개미.png", '=1+1,"q".png', "two\nlines.png", os.fsdecode(b"caf\xe9.png"), "6.png")


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Return the folder `photos` with six images of each of three classes, in the current folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for label in ("ant", "bee", "-wasp"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for name in NAMES:
            Image.fromarray(rng.integers(0, 256, (28, 28), np.uint8)).save(tmp_path / "photos" / label / name)
    return tmp_path / "photos"


def write(text, path="corrections.csv"):
    with open(path, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123
        file.write(text)
    return path


def labels_of(dataset):
    """Return the class of each image by its path relative to the data."""
    (split,) = dataset.splits.values()
    return {
        os.path.relpath(path, dataset.root): dataset.labels[label]
        for path, label in zip(split.images, split.labels, strict=True)
    }


def test_corrections_change_and_leave_out_only_the_named_images(photos):
    before = labels_of(open_data("photos"))
    path = write(f"file,label\nant/6.png,bee\nphotos/bee/6.png,ant\n{photos}/ant/개미.png,\nbee/개미.png,bee\n")
    dataset = open_data(CorrectedData("photos", path))
    expected = {**before, "ant/6.png": "bee", "bee/6.png": "ant"}
    del expected["ant/개미.png"]
    assert labels_of(dataset) == expected
    assert (dataset.corrections.changed, dataset.corrections.left_out) == (2, 1)
    assert dataset.notes[-1] == "corrections.csv: 2 labels corrected, 1 image left out"
    assert dataset.fingerprint() != open_data("photos").fingerprint()
    assert data_arguments(CorrectedData("photos", path)) == ("photos", "--corrections", path)


def test_names_with_special_characters_are_matched(photos):
    path = write(
        "file,label\r\n"
        "ant/a b#1%.png,bee\r\n"
        '"bee/=1+1,""q"".png",\'-wasp\r\n'
        '"ant/two\nlines.png",-wasp\r\n'
        "'-wasp/6.png,ant\r\n"
        "bee/caf\\udce9.png,ant\r\n"
    )
    labels = labels_of(correct_labels(open_data("photos"), path))
    assert labels["ant/a b#1%.png"] == "bee"
    assert labels['bee/=1+1,"q".png'] == labels["ant/two\nlines.png"] == "-wasp"
    assert labels["-wasp/6.png"] == labels[f"bee/{NAMES[4]}"] == "ant"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,label\nbee/6.pmg,ant\n", r"Line 2 of .* got 'bee/6.pmg'\. Did you mean 'bee/6.png'\?"),
        ("file,label\nwasp/6.png,ant\n", r"Line 2 of .* relative to it or absolute.* Did you mean '-wasp/6.png'\?"),
        ("file,label\n/elsewhere/x.png,ant\n", r"Line 2 of .* got '/elsewhere/x.png'\.$"),
        ("file,label\nbee/6.png,ants\n", r"Line 2 of .* must have a class of 'photos'.* Did you mean 'ant'\?"),
        (
            "file,label\nbee/6.png,ant\n\nphotos/bee/6.png,\n",
            r"Line 4 of .* must label 'photos/bee/6.png' as line 2 does",
        ),
        ("file,labels\nbee/6.png,ant\n", "must have the columns file and label"),
        ("file,label\n", "CSV must have lines of file,label, got none"),
        ("ant/6.png bee\n", "Line 1 of .* must name an image of 'photos'"),
    ],
)
def test_wrong_corrections_are_rejected(photos, text, message):
    with pytest.raises(UsageError, match=message):
        correct_labels(open_data("photos"), write(text))


def test_missing_file_and_empty_split_are_rejected(photos):
    with pytest.raises(UsageError, match=r"Corrections must be a \.csv file that exists, got 'nowhere\.csv'"):
        correct_labels(open_data("photos"), "nowhere.csv")
    pixels = np.zeros((3, 8, 8), np.uint8)
    arrays = {"train_images": pixels, "train_labels": [0, 1, 1], "val_images": pixels[:1], "val_labels": [1]}
    dataset = open_data(arrays)
    corrected = correct_labels(dataset, write("train image 2,0\n"))
    assert corrected.splits["train"].labels.tolist() == [0, 1, 0]
    with pytest.raises(UsageError, match="must leave an image in each split, got none in val"):
        correct_labels(dataset, write("val image 0,\n"))
    several = open_data(write("file,labels\nphotos/ant/6.png,ant;bee\n", "several.csv"))
    with pytest.raises(UsageError, match="must have data with one class for each image"):
        correct_labels(several, write("photos/ant/6.png,ant\n"))


def test_members_of_archives_and_lines_of_csv_data_are_corrected(photos):
    with zipfile.ZipFile("photos.zip", "w") as archive:
        for label in ("ant", "bee"):
            archive.write(photos / label / "6.png", f"{label}/6.png")
    dataset = correct_labels(open_data("photos.zip"), write("ant/6.png,bee\n"))
    assert dataset.first_split.labels.tolist() == [1, 1]
    listed = write("file,label\nant/6.png,x\nbee/6.png,y\n", photos / "list.csv")
    assert correct_labels(open_data(listed), write("bee/6.png,x\n")).first_split.labels.tolist() == [0, 0]


def test_checksum_is_of_the_corrections_that_are_applied(photos, monkeypatch):
    """The file changes each time after it was read."""
    read_bytes, path = Path.read_bytes, Path(write("ant/6.png,bee\n"))
    content = path.read_bytes()

    def read_and_change(file):
        before = read_bytes(file)
        if file == path:
            write("bee/6.png,ant\n")
        return before

    monkeypatch.setattr(Path, "read_bytes", read_and_change)
    dataset = correct_labels(open_data("photos"), path)
    assert labels_of(dataset)["ant/6.png"] == "bee"
    assert dataset.corrections.sha256 == hashlib.sha256(content).hexdigest()


def test_doctor_does_not_call_left_out_images_unused(photos):
    diagnosis = vitrail.doctor("photos", corrections=write("ant/6.png,\n"))
    assert len(diagnosis.dataset.first_split) == 17
    assert not [finding for finding in diagnosis.findings if finding.kind == "ignored-file"]


def test_run_with_corrections_equals_run_on_moved_files(call, photos):
    """The same bits as after the change of the class folders, for files whose order stays the same."""
    settings = ("--model", "ViT-Nano/7", "--steps", "2", "--batch", "8", "--threads", "1", "--set", "holdout=0")
    path = write("ant/6.png,bee\n")
    assert call("train", "photos", *settings, "--corrections", path, "--output", "run").returncode == 0
    labels = open_data("photos")
    images = list(labels.first_split.images)
    names = ["bee" if image.endswith("ant/6.png") else image.split("/")[-2] for image in images]
    vitrail.train(
        (images, names), "ViT-Nano/7", steps=2, batch=8, threads=1, settings={"holdout": 0}, output="relabelled"
    )
    weights, expected = (load_file(f"{run}/bundle/model.safetensors") for run in ("run", "relabelled"))
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)
    provenance = json.loads((photos.parent / "run/bundle/provenance.json").read_text())
    assert provenance["corrections"].items() >= {"file": path, "changed": 1, "left_out": 0}.items()
    assert provenance["data_fingerprint"] == open_data(CorrectedData("photos", path)).fingerprint()
    assert 'corrections = "corrections.csv"' in (photos.parent / "run/config.toml").read_text()
    assert "1 labels changed, 0 images left out" in (photos.parent / "run/report.html").read_text()


def test_resumed_run_must_have_the_same_corrections(call, photos):
    command = ("train", "photos", "--model", "ViT-Nano/7", "--epochs", "4", "--set", "batch=8", "warmup=0")
    path = write("ant/6.png,bee\n-wasp/개미.png,\n")
    for run in ("whole", "resumed"):
        assert call(*command, "--corrections", path, "--output", run).returncode == 0
    newest = max((photos.parent / "resumed/checkpoints").glob("step-*"))
    shutil.rmtree(newest)
    shutil.rmtree(photos.parent / "resumed/bundle")
    resume = (*command, "--output", "resumed", "--resume", "auto")
    assert "must have the corrections that it started with, got 'none' after" in call(*resume).stderr
    other = write("ant/6.png,bee\n", "other.csv")
    assert "must have the corrections" in call(*resume, "--corrections", other).stderr
    done = call(*resume, "--corrections", path)
    assert "resuming after step" in done.stderr, done.stderr
    weights = [(photos.parent / run / "bundle/model.safetensors").read_bytes() for run in ("whole", "resumed")]
    assert weights[0] == weights[1]


def test_evaluate_finds_held_out_images_of_corrected_data_again(call, photos):
    path = write("ant/6.png,bee\n")
    run = vitrail.train("photos", "ViT-Nano/7", steps=1, batch=8, corrections=path, output="run")
    assert run.scores["split"] == "held-out"
    evaluation = vitrail.evaluate("run/bundle", "photos", corrections=path)
    assert (evaluation.split, evaluation.accuracy) == ("held-out", run.accuracy)
    tuned = vitrail.finetune("run/bundle", "photos", steps=1, batch=8, corrections=path)
    assert tuned.bundle.provenance["corrections"]["changed"] == 1


def test_people_are_split_by_corrected_labels(photos):
    shutil.copytree(photos / "ant", photos / "fly")
    people = write("ant\nbee\n", "people.txt")
    path = write("ant/6.png,-wasp\n-wasp/개미.png,bee\nfly/6.png,\n")
    dataset = vitrail.doctor("photos", people=people, corrections=path).dataset
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 12, "test": 11}
    dataset, _, _ = split_people(
        CorrectedData("photos", path), people=people, test_share=0.5, validation_share=0, seed=0
    )
    assert "photos/ant/6.png" in dataset.splits["test"].images
    assert "photos/-wasp/개미.png" in dataset.splits["train"].images
