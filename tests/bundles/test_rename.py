"""`vitrail rename`: labels change, weights and scores do not, also with several processes or a kill at any time."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tests.bundles.test_bundle import FIXTURE, GREY_8, tiny
from vitrail.bundles import rename
from vitrail.bundles.bundle import Bundle
from vitrail.bundles.decision import MultiLabel
from vitrail.bundles.metadata import read_bundle_info
from vitrail.core import files
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.files import MANIFEST

LABELS = ["Ankle boot", "Bag", "Coat", "Dress", "Pullover", "Sandal", "Shirt", "Sneaker", "T-shirt/top", "Trouser"]


@pytest.fixture
def bundle(tmp_path):
    """Return a copy of the embedded bundle."""
    vitrail.rename("fashion", {"Bag": "Bag"}, output=tmp_path / "bundle")
    return tmp_path / "bundle"


def contents(folder, *without):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in without}


def labels_of(folder):
    return json.loads((folder / "labels.json").read_text(encoding="utf-8"))


def test_only_labels_and_manifest_change(bundle, call):
    before = contents(bundle, "labels.json", MANIFEST)
    done = call("rename", bundle, "Bag=Coat", "Coat=Bag", "Dress=원피스", "T-shirt/top=a=b", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    expected = ["Ankle boot", "Coat", "Bag", "원피스", *LABELS[4:8], "a=b", "Trouser"]
    renamed = {"Bag": "Coat", "Coat": "Bag", "Dress": "원피스", "T-shirt/top": "a=b"}
    assert json.loads(done.stdout) == {"bundle": str(bundle), "renamed": renamed, "labels": expected}
    assert labels_of(bundle) == expected
    assert contents(bundle, "labels.json", MANIFEST) == before
    loaded, original = vitrail.load(bundle), vitrail.load("fashion")
    assert loaded.labels == tuple(expected)
    assert loaded.provenance == original.provenance
    assert "scores" in loaded.provenance
    again = call("rename", bundle, "a=b=c")  # "a=b" is a label, "a" is not
    assert again.stdout.split() == ["label", "new", "name", "a=b", "c", "bundle", str(bundle)]


def test_predictions_have_the_new_names_with_every_engine(bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    image = [np.zeros((28, 28), np.uint8)]
    before = {engine: vitrail.Classifier(bundle, engine=engine).predict(image)[0] for engine in ("torch", "onnx")}
    old = before["torch"].label
    vitrail.rename(bundle, {old: "new"})
    for engine, prediction in before.items():
        after = vitrail.Classifier(bundle, engine=engine).predict(image)[0]
        assert (prediction.label, after.label) == (old, "new")
        assert after.score == pytest.approx(prediction.score, abs=1e-6)


def test_copy_leaves_the_source_as_it_is(bundle, tmp_path, call):
    before, copy = contents(bundle), tmp_path / "copy"
    vitrail.rename(bundle, ["Bag=Handbag"], output=copy)
    assert contents(bundle) == before
    assert labels_of(copy)[1] == "Handbag"
    assert "must not exist yet" in call("rename", bundle, "Bag=Case", "--output", copy).stderr
    assert call("rename", bundle, "Bag=Case", "--output", copy, "--force").returncode == 0
    assert labels_of(copy)[1] == "Case"
    (copy / "precious.txt").write_text("mine")
    assert "only files that vitrail wrote" in call("rename", copy, "Case=Bag").stderr
    assert labels_of(copy)[1] == "Case"


def test_link_to_a_bundle_stays_a_link(bundle, tmp_path):
    (tmp_path / "link").symlink_to(bundle)
    vitrail.rename(tmp_path / "link", {"Bag": "Handbag"})
    assert (tmp_path / "link").is_symlink()
    assert labels_of(bundle)[1] == "Handbag"


def test_bundle_without_names_is_renamed_by_class_number(tmp_path):
    vitrail.save(vitrail.Bundle(model=tiny(), preprocess=GREY_8), tmp_path / "bundle")
    classes = vitrail.load(tmp_path / "bundle").model.config.classes
    vitrail.rename(tmp_path / "bundle", {"1": "cat"})
    assert vitrail.load(tmp_path / "bundle").labels == ("0", "cat", *map(str, range(2, classes)))


def test_manifest_that_names_files_outside_of_the_bundle_copies_none_of_them(bundle, tmp_path):
    manifest = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    manifest["files"]["../profile"] = "0"
    (bundle / MANIFEST).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (tmp_path / "profile").write_text("a stranger's")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "profile").write_text("mine")
    vitrail.rename(bundle, {"Bag": "Case"}, output=tmp_path / "home" / "copy")
    assert (tmp_path / "home" / "profile").read_text() == "mine"
    assert labels_of(tmp_path / "home" / "copy")[1] == "Case"


def test_bundle_with_several_labels_keeps_its_decision_rule(tmp_path):
    model, labels = tiny(classes=3), ("a", "b", "c")
    rule = MultiLabel(thresholds=(0.1, 0.2, 0.3))
    vitrail.save(Bundle(model=model, preprocess=GREY_8, labels=labels, answer=rule), tmp_path / "bundle")
    vitrail.rename(tmp_path / "bundle", {"b": "d"})
    renamed = vitrail.load(tmp_path / "bundle")
    assert (renamed.labels, renamed.answer) == (("a", "d", "c"), rule)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["Bga=x"], "Label must be one that the bundle has, got 'Bga'. Did you mean 'Bag'?"),
        (["Bag=Coat"], "Labels must differ from each other, got 'Coat' twice."),
        (["Bag=x", "Coat=x"], "Labels must differ from each other, got 'x' twice."),
        (["Bag=x", "Bag=y"], "Label must be renamed once, got 'Bag' twice."),
        (["Bag"], "Name of a label must be OLD=NEW, got 'Bag'."),
        (["Bag="], "Label must be a string that is not empty, got ''."),
        ([], "Labels to rename must be at least one, got none."),
        ({"Bag": 3}, "Label must be a string that is not empty, got 3."),
        ([3], "Name of a label must be OLD=NEW, got 3."),
    ],
)
def test_impossible_names_change_nothing(bundle, names, message):
    before = contents(bundle)
    with pytest.raises(UsageError) as caught:
        vitrail.rename(bundle, names)
    assert message in str(caught.value)
    assert contents(bundle) == before
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_name_that_fits_two_labels_is_an_error(bundle):
    vitrail.rename(bundle, {"Bag": "a", "Coat": "a=b"})
    with pytest.raises(UsageError, match="fits several"):
        vitrail.rename(bundle, ["a=b=c"])
    assert vitrail.rename(bundle, {"a=b": "c"})["labels"][1:3] == ["a", "c"]


def test_bundles_that_cannot_be_renamed_are_errors(bundle, tmp_path):
    with pytest.raises(UsageError, match="Output must be given for the embedded bundle 'fashion'"):
        vitrail.rename("fashion", {"Bag": "Case"})
    headless = tmp_path / "headless"
    shutil.copytree(FIXTURE.with_name("bundle-without-head"), headless)
    with pytest.raises(UsageError, match="Bundle must have a model that predicts classes, got one that predicts feat"):
        vitrail.rename(headless, {"0": "cat"})
    (bundle / "model.safetensors").write_bytes(b"spoilt")
    with pytest.raises(CorruptFileError, match=r"model.safetensors' is corrupt"):
        vitrail.rename(bundle, {"Bag": "Case"})
    assert labels_of(bundle) == LABELS


def test_renames_at_the_same_time_are_all_kept(bundle, monkeypatch):
    def rename_all():
        barrier = threading.Barrier(len(LABELS))

        def rename_label(label):
            barrier.wait()
            vitrail.rename(bundle, {label: f"new {label}"})

        with ThreadPoolExecutor(len(LABELS)) as pool:
            list(pool.map(rename_label, labels_of(bundle)))

    rename_all()
    assert labels_of(bundle) == [f"new {label}" for label in LABELS]
    with monkeypatch.context() as patch:  # without the lock, renames are lost
        patch.setattr(rename, "folder_lock", lambda _: contextlib.nullcontext())
        with contextlib.suppress(VitrailError):
            rename_all()
    assert labels_of(bundle) != [f"new new {label}" for label in LABELS]


@pytest.mark.parametrize(
    "count", [1, 2]
)  # file systems use inodes again, so that the second folder has the first one's
@pytest.mark.parametrize("read", [vitrail.load, read_bundle_info])
def test_reader_starts_again_if_the_bundle_is_replaced(read, count, bundle, monkeypatch):
    checksum, pending = files.checksum, ["Case", "Box", "Sack", "Trunk"]

    def rename_while_reading(path):
        if pending and path == bundle / "preprocess.json":  # the manifest has been read, labels.json has not
            with monkeypatch.context() as patch:
                patch.setattr(files, "checksum", checksum)
                for _ in range(count):
                    vitrail.rename(bundle, {labels_of(bundle)[1]: pending.pop()})
        return checksum(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "checksum", rename_while_reading)
        assert read(bundle).labels[1] == "Case"
    (bundle / "labels.json").write_text("[]")
    with pytest.raises(CorruptFileError, match=r"labels.json' is corrupt"):
        read(bundle)


@pytest.mark.parametrize("read", [vitrail.load, read_bundle_info])
def test_bundle_that_is_removed_while_it_is_read_is_an_error_of_one_line(read, bundle, monkeypatch):
    def remove_and_read(path):
        shutil.rmtree(bundle)
        raise CorruptFileError(path=path, cause="is missing")

    monkeypatch.setattr(files, "checksum", remove_and_read)
    with pytest.raises(UsageError, match="Bundle must be a folder that exists"):
        read(bundle)


SWAP = """
import sys, vitrail
while True:
    vitrail.rename(sys.argv[1], {"Bag": "Coat", "Coat": "Bag"})
    print("renamed", flush=True)
"""


def test_bundle_is_complete_after_a_kill_at_any_time(bundle):
    weights = (bundle / "model.safetensors").read_bytes()
    for milliseconds in (0, 1, 3, 7, 15):
        command = [sys.executable, "-c", SWAP, str(bundle)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout.readline() == b"renamed\n"
            time.sleep(milliseconds / 1000)
            os.kill(process.pid, signal.SIGKILL)
        assert read_bundle_info(bundle).labels in (tuple(LABELS), ("Ankle boot", "Coat", "Bag", *LABELS[3:]))
        assert (bundle / "model.safetensors").read_bytes() == weights
    for temporary in Path(bundle.parent).glob(".bundle.writing-*"):
        shutil.rmtree(temporary)
