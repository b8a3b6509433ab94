"""Mutated data sets are rejected with a one-line error or read as the reader of another library reads them."""

import gzip
import os
import random
import re
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.data.sources.test_archives import (
    PHOTOS,
    SYNSETS,
    cifar_files,
    make_png,
    synset_file,
    write_folder,
    write_matlab,
    write_tar,
    write_zip,
)
from vitrail.core.errors import VitrailError
from vitrail.data.decode import read_file
from vitrail.data.sources.registry import open_data


def mutate(intact: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a random mutation."""
    content, start = bytearray(intact), rng.randrange(len(intact))
    other, size = rng.randrange(len(intact)), rng.choice([1, 2, 4, 8, 16, 64, 512, 1024])
    match rng.choice(["bit", "bit", "bit", "byte", "byte", "cut", "repeat", "leave out", "move", "zero", "insert"]):
        case "bit":
            content[start] ^= 1 << rng.randrange(8)
        case "byte":
            content[start] = rng.randrange(256)
        case "cut":
            del content[start:]
        case "repeat":
            content[start:start] = content[start : start + size]
        case "leave out":
            del content[start : start + size]
        case "move":
            content[start : start + size] = content[other : other + size]
        case "zero":
            content[start : start + size] = bytes(len(content[start : start + size]))
        case "insert":
            content[start:start] = rng.randbytes(min(size, 8))
    return bytes(content)


def read_ours(data: Path) -> list[tuple[str, object, bytes]]:
    """Return the split, class (or classes) and content of every image, sorted."""
    dataset = open_data(data)
    contents = []
    for split in dataset.splits.values():
        for image, label in zip(split.images, split.labels, strict=True):
            name = dataset.labels[label] if label.ndim == 0 else tuple(np.array(dataset.labels)[label > 0].tolist())
            content = image.tobytes() if split.in_memory is not None else read_file(image)
            contents.append((split.name, name, content))
    return sorted(contents, key=repr)


def split_paths(files: dict[str, bytes]):
    """Return the split, class and content of images in class folders, from their paths."""
    assert all(len(name.split("/")) == 4 and name.endswith(".png") for name in files)
    return [(*name.split("/")[1:3], content) for name, content in files.items()]


def make_zip(tmp_path):
    def read_theirs():
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+/[^/]+/[^/]+/[^/]+\.png", name)]
            return split_paths({name: archive.read(name) for name in names})

    path = write_zip(tmp_path / "a.zip", PHOTOS)
    return path, path, read_theirs


def make_tar_gz(tmp_path):
    def read_theirs():
        with tarfile.open(path) as archive:
            return split_paths({info.name: archive.extractfile(info).read() for info in archive})

    path = write_tar(tmp_path / "a.tar.gz", PHOTOS, "w:gz")
    return path, path, read_theirs


def make_npz(tmp_path):
    def read_theirs():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        with np.load(path) as arrays:
            names = arrays["classes"] if "classes" in arrays else np.arange(3)
            return [
                (split, str(names[label]), image.tobytes())
                for split in ("train", "test")
                if f"{split}_images" in arrays
                for image, label in zip(arrays[f"{split}_images"], arrays[f"{split}_labels"], strict=True)
            ]

    path, pixels = tmp_path / "a.npz", np.random.default_rng(0).integers(0, 256, (9, 4, 4, 3), np.uint8)
    labels = np.arange(9) % 3
    names = np.array(["ant", "bee", "cow"])
    np.savez(
        path,
        train_images=pixels[:6],
        train_labels=labels[:6],
        test_images=pixels[6:],
        test_labels=labels[6:],
        classes=names,
    )
    return path, path, read_theirs


def make_idx(tmp_path):
    def read(name):
        content = gzip.decompress((tmp_path / f"{name}.gz").read_bytes())
        assert content[:3] == b"\0\0\x08"
        shape = struct.unpack(f">{content[3]}I", content[4 : 4 + 4 * content[3]])
        return np.frombuffer(content[4 + 4 * content[3] :], np.uint8).reshape(shape)

    def read_theirs():
        pairs = zip(read("train-images-idx3-ubyte"), read("train-labels-idx1-ubyte"), strict=True)
        return [("train", str(label), image.tobytes()) for image, label in pairs]

    pixels, labels = np.random.default_rng(0).integers(0, 256, (6, 5, 4), np.uint8), np.arange(6, dtype=np.uint8) % 3
    for name, array in (("train-images-idx3-ubyte", pixels), ("train-labels-idx1-ubyte", labels)):
        header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return tmp_path, tmp_path / "train-images-idx3-ubyte.gz", read_theirs


def make_csv(tmp_path):
    write_folder(tmp_path, {f"i{number}.png": make_png(number) for number in range(8)})
    lines = [f"i{number}.png,{('cat;dog', 'dog', 'emu;cat')[number % 3]},train\n" for number in range(8)]
    path = tmp_path / "a.csv"
    path.write_text("file,labels,split\n" + "".join(lines))
    return path, path


def make_cifar(tmp_path):
    files, _, _ = cifar_files("10-bin")
    path = write_folder(tmp_path, files) / "cifar-10-batches-bin" / "batches.meta.txt"
    return path.parent, path


def make_pets(tmp_path):
    names = [f"{breed}_{number}" for breed in ("cat", "dog", "pug") for number in range(3)]
    numbered = [f"{name} {number // 3 + 1} 1 1\n" for number, name in enumerate(names)]
    files = {f"images/{name}.jpg": make_png(number) for number, name in enumerate(names)}
    files["annotations/trainval.txt"] = "".join(numbered[::2]).encode()
    files["annotations/test.txt"] = "".join(numbered[1::2]).encode()
    return write_folder(tmp_path, files), tmp_path / "annotations/trainval.txt"


def make_synsets(tmp_path):
    files = {f"ILSVRC2012_val_{number:08d}.JPEG": make_png(number) for number in range(1, 6)}
    files[SYNSETS] = synset_file("n11", "n12", "n13", "n11", "n14")
    return write_folder(tmp_path, files), tmp_path / SYNSETS


def make_flowers(tmp_path):
    ids = {"trnid": np.array([3, 4, 5]), "valid": np.array([1, 2]), "tstid": np.array([6, 7, 8, 9])}
    labels_file = write_matlab(tmp_path, {"labels": np.arange(51, 60, dtype=np.uint8)[None]})
    files = {f"jpg/image_{number:05d}.jpg": make_png(number) for number in range(1, 10)}
    files |= {"imagelabels.mat": labels_file, "setid.mat": write_matlab(tmp_path, ids)}
    path = tmp_path / "set" / "imagelabels.mat"
    return write_folder(tmp_path / "set", files), path


WITH_READER = [make_zip, make_tar_gz, make_npz, make_idx]
WITHOUT_READER = [make_csv, make_cifar, make_pets, make_synsets, make_flowers]
COUNTS = [40, pytest.param(1000, marks=pytest.mark.slow)]


def read_mutations(data: Path, path: Path, count: int, seed: str):
    """Mutate a file `count` times, and yield each time the images that we read or the error message."""
    intact, rng = path.read_bytes(), random.Random(seed)
    for number in range(count):
        path.write_bytes(mutate(intact, rng))
        os.utime(path, (number, number))
        try:
            yield read_ours(data)
        except VitrailError as error:
            yield str(error)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("make", WITH_READER)
def test_mutated_data_are_rejected_or_read_as_by_other_library(make, count, folder):
    data, path, read_theirs = make(folder)
    original = read_ours(data)
    assert original == sorted(read_theirs(), key=repr)
    rejected = 0
    for ours in read_mutations(data, path, count, f"{make.__name__} {count}"):
        if isinstance(ours, str):
            rejected += 1
            assert "\n" not in ours
        else:
            assert ours == original or ours == sorted(read_theirs(), key=repr)
    assert rejected > count / 3


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("make", WITHOUT_READER)
def test_mutated_label_lists_are_read_or_rejected_in_one_line(make, count, folder):
    data, path = make(folder)
    errors = [ours for ours in read_mutations(data, path, count, f"{make.__name__} {count}") if isinstance(ours, str)]
    assert len(errors) > count / 3
    assert not any("\n" in error for error in errors)
