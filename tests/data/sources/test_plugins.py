"""Data sources: which source opens which DATA, their descriptions in the help, and added sources."""

import struct
from pathlib import Path

import numpy as np
import pytest

from vitrail.core.errors import UsageError
from vitrail.core.registry import Registry
from vitrail.data.sources import registry
from vitrail.data.sources.arrays import dataset_from_arrays
from vitrail.data.sources.base import Source
from vitrail.data.sources.registry import (
    SOURCES,
    all_sources,
    describe_sources,
    open_data,
    open_images,
    sample_images,
    source_descriptions,
)


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """The working folder, with data of several forms. Image files are not valid: listing does not read them."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/train/cat/1.png", "photos/train/dog/2.png", "photos/val/cat/3.png", "flat/b/1.jpg"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"x" * len(name))
    Path("flat/a").mkdir()
    Path("table.csv").write_text("photos/train/cat/1.png,z,train\nphotos/val/cat/3.png,y,test\n")
    images, labels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([1, 0], np.uint8)
    np.savez("arrays.npz", images=images, labels=labels)
    Path("idx").mkdir()
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        Path(f"idx/train-{name}-ubyte").write_bytes(header + array.tobytes())
    return tmp_path


# Runs of earlier versions can only be resumed if the fingerprint of their data is unchanged.
@pytest.mark.parametrize(
    ("data", "source", "fingerprint"),
    [
        ("photos", "ClassFolder", "5949f0ea9094b20e"),
        ("flat", "ClassFolder", "eaf01da95fa62974"),
        ("idx", "IdxFolder", "6f46c6c990a00ed6"),
        ("arrays.npz", "NpzFile", "f1b5f4d351136fa7"),
        ("table.csv", "CsvFile", "7c7d028d7ac6616b"),
        ("digits", "Digits", "5c944edac9466f52"),
        ("fashion-40", "Fashion40", "068cc26cca949486"),
    ],
)
def test_each_form_of_data_is_opened_by_its_source_with_unchanged_fingerprint(data_folder, data, source, fingerprint):
    assert next(type(candidate).__name__ for candidate in all_sources() if candidate.recognises(data)) == source
    assert open_data(data).fingerprint()[:16] == fingerprint
    if source not in ("Digits", "Fashion40"):
        assert open_data(data_folder / data).fingerprint()[:16] == fingerprint


def test_open_data_returns_a_dataset_unchanged():
    data = open_data("digits")
    assert open_data(data) is data


def test_help_and_error_contain_descriptions_of_sources(call):
    for command in ("doctor", "train", "finetune", "evaluate"):
        assert "`vitrail help data` lists all forms" in " ".join(call(command, "--help").stdout.split())
    forms = call("help", "data").stdout.splitlines()
    assert all(f"  {description}" in forms for description in source_descriptions())
    result = call("doctor", "digit")
    assert result.returncode == 2
    assert result.stderr == (
        "vitrail: Data must be a file or folder that exists, or a built-in data set (digits, fashion-40,"
        " fashion-mnist), got 'digit'. Did you mean 'digits'?\n"
    )
    assert describe_sources() == (
        "a folder of class folders (perhaps in train, val, test), Oxford Flowers, Oxford Pets, ImageNet's validation"
        " images with their list of labels, Tiny-ImageNet, CIFAR-10 or CIFAR-100 as distributed, a .zip, .tar or"
        " .tar.gz of one of these folders, a folder of idx files, a .npz file of images and labels, a .csv file of"
        " image files and labels, digits, fashion-40 or fashion-mnist"
    )


class StripesInMemory(Source):
    """`stripes:5` is five images in two classes."""

    description = "stripes:N"
    word = "stripes:2"

    def recognises(self, data):
        return str(data).startswith("stripes:")

    def open(self, data):
        count = int(str(data).partition(":")[2])
        images = np.zeros((count, 8, 8), np.uint8)
        return dataset_from_arrays({"images": images, "labels": np.arange(count) % 2}, str(data))


def test_registered_source_opens_data_and_is_suggested(call, monkeypatch):
    with pytest.raises(UsageError, match=r"^Data must be a file or folder that exists, .*, got 'stripes:5'"):
        open_data("stripes:5")
    monkeypatch.setattr(
        registry, "SOURCES", Registry("source", {"stripes": f"{__name__}:StripesInMemory", **SOURCES._built_ins})
    )
    assert len(open_data("stripes:5").first_split) == 5
    with pytest.raises(UsageError, match=r"fashion-mnist, stripes:2\), got 'stripe:5'\. Did you mean 'stripes:2'\?"):
        open_data("stripe:5")
    assert call("doctor", "stripes:6").stdout.split()[:6] == ["data", "stripes:6", "images", "6", "all", "classes"]


def test_open_images_accepts_folder_without_class_folders(data_folder):
    for name in ("loose/b.png", "loose/a.jpg", "loose/notes/read.me", "mixed/a.png", "mixed/cat/b.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    loose = open_images("loose")
    assert (loose.labels, loose.first_split.images) == ((), ["loose/a.jpg", "loose/b.png"])
    assert sample_images("mixed", 9) == ["mixed/a.png", "mixed/cat/b.png"]
    mixed = open_images("mixed")
    assert (mixed.labels, mixed.first_split.images) == (("cat",), ["mixed/cat/b.png"])
    assert mixed.notes == ("1 images beside the folders in 'mixed' are left out",)
    Path("empty").mkdir()
    with pytest.raises(UsageError, match="Data must have images, got the folder 'empty' without any"):
        open_images("empty")


def test_open_images_keeps_labels_of_recognised_data(data_folder):
    """A folder that another source recognises keeps its labels, even if all of its images are in one folder."""
    Path("idx/preview.png").touch()
    Path("val").mkdir()
    for number in (1, 2):
        Path(f"val/ILSVRC2012_val_0000000{number}.JPEG").touch()
    Path("val/val.txt").write_text("ILSVRC2012_val_00000001.JPEG 5\nILSVRC2012_val_00000002.JPEG 9\n")
    Path("fashion-40").mkdir()
    Path("fashion-40/a.png").touch()
    for data in ("idx", "val", "fashion-40", "photos", "arrays.npz"):
        assert open_images(data).fingerprint() == open_data(data).fingerprint()
        assert open_images(data).labels
