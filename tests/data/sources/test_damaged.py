"""Data with bits flipped, bytes changed, parts cut out, repeated or moved: refused in one line, or read. Formats with a
reader in another library are read as that reader reads the changed file."""

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
    matlab,
    png,
    synsets,
    write_folder,
    write_tar,
    write_zip,
)
from vitrail.core.errors import VitrailError
from vitrail.data.decode import read_file
from vitrail.data.sources.registry import open_data


def mutate(whole: bytes, chance: random.Random) -> bytes:
    content, at = bytearray(whole), chance.randrange(len(whole))
    other, size = chance.randrange(len(whole)), chance.choice([1, 2, 4, 8, 16, 64, 512, 1024])
    match chance.choice(["bit", "bit", "bit", "byte", "byte", "cut", "repeat", "leave out", "move", "zero", "insert"]):
        case "bit":
            content[at] ^= 1 << chance.randrange(8)
        case "byte":
            content[at] = chance.randrange(256)
        case "cut":
            del content[at:]
        case "repeat":
            content[at:at] = content[at : at + size]
        case "leave out":
            del content[at : at + size]
        case "move":
            content[at : at + size] = content[other : other + size]
        case "zero":
            content[at : at + size] = bytes(len(content[at : at + size]))
        case "insert":
            content[at:at] = chance.randbytes(min(size, 8))
    return bytes(content)


def read_ours(data: Path) -> list[tuple[str, object, bytes]]:
    """Split, class (or classes) and content of every image."""
    dataset = open_data(data)
    found = []
    for split in dataset.splits.values():
        for image, label in zip(split.images, split.labels, strict=True):
            name = dataset.labels[label] if label.ndim == 0 else tuple(np.array(dataset.labels)[label > 0].tolist())
            content = image.tobytes() if split.in_memory is not None else read_file(image)
            found.append((split.name, name, content))
    return sorted(found, key=repr)


def of_folders(files: dict[str, bytes]):
    """The images of archives of class folders, by their paths."""
    assert all(len(name.split("/")) == 4 and name.endswith(".png") for name in files)
    return [(*name.split("/")[1:3], content) for name, content in files.items()]


def make_zip(tmp_path):
    def theirs():
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+/[^/]+/[^/]+/[^/]+\.png", name)]
            return of_folders({name: archive.read(name) for name in names})

    path = write_zip(tmp_path / "a.zip", PHOTOS)
    return path, path, theirs


def make_tar_gz(tmp_path):
    def theirs():
        with tarfile.open(path) as archive:
            return of_folders({one.name: archive.extractfile(one).read() for one in archive})

    path = write_tar(tmp_path / "a.tar.gz", PHOTOS, "w:gz")
    return path, path, theirs


def make_npz(tmp_path):
    def theirs():
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
    return path, path, theirs


def make_idx(tmp_path):
    def read(name):
        content = gzip.decompress((tmp_path / f"{name}.gz").read_bytes())
        assert content[:3] == b"\0\0\x08"
        shape = struct.unpack(f">{content[3]}I", content[4 : 4 + 4 * content[3]])
        return np.frombuffer(content[4 + 4 * content[3] :], np.uint8).reshape(shape)

    def theirs():
        pairs = zip(read("train-images-idx3-ubyte"), read("train-labels-idx1-ubyte"), strict=True)
        return [("train", str(label), image.tobytes()) for image, label in pairs]

    pixels, labels = np.random.default_rng(0).integers(0, 256, (6, 5, 4), np.uint8), np.arange(6, dtype=np.uint8) % 3
    for name, array in (("train-images-idx3-ubyte", pixels), ("train-labels-idx1-ubyte", labels)):
        header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(header + array.tobytes()))
    return tmp_path, tmp_path / "train-images-idx3-ubyte.gz", theirs


def make_csv(tmp_path):
    write_folder(tmp_path, {f"i{number}.png": png(number) for number in range(8)})
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
    files = {f"images/{name}.jpg": png(number) for number, name in enumerate(names)}
    files["annotations/trainval.txt"] = "".join(numbered[::2]).encode()
    files["annotations/test.txt"] = "".join(numbered[1::2]).encode()
    return write_folder(tmp_path, files), tmp_path / "annotations/trainval.txt"


def make_synsets(tmp_path):
    files = {f"ILSVRC2012_val_{number:08d}.JPEG": png(number) for number in range(1, 6)}
    files[SYNSETS] = synsets("n11", "n12", "n13", "n11", "n14")
    return write_folder(tmp_path, files), tmp_path / SYNSETS


def make_flowers(tmp_path):
    ids = {"trnid": np.array([3, 4, 5]), "valid": np.array([1, 2]), "tstid": np.array([6, 7, 8, 9])}
    whole = matlab(tmp_path, {"labels": np.arange(51, 60, dtype=np.uint8)[None]})
    files = {f"jpg/image_{number:05d}.jpg": png(number) for number in range(1, 10)}
    files |= {"imagelabels.mat": whole, "setid.mat": matlab(tmp_path, ids)}
    path = tmp_path / "set" / "imagelabels.mat"
    return write_folder(tmp_path / "set", files), path


WITH_READER = [make_zip, make_tar_gz, make_npz, make_idx]
WITHOUT = [make_csv, make_cifar, make_pets, make_synsets, make_flowers]
COUNTS = [40, pytest.param(1000, marks=pytest.mark.slow)]


def damaged(data: Path, path: Path, count: int, seed: str):
    """Damage a file many times, and yield the images that we read each time, or the error."""
    whole, chance = path.read_bytes(), random.Random(seed)
    for number in range(count):
        path.write_bytes(mutate(whole, chance))
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
def test_damaged_data_is_refused_or_read_as_others_read_it(make, count, folder):
    data, path, read_theirs = make(folder)
    original = read_ours(data)
    assert original == sorted(read_theirs(), key=repr)
    refused = 0
    for ours in damaged(data, path, count, f"{make.__name__} {count}"):
        if isinstance(ours, str):
            refused += 1
            assert "\n" not in ours
        else:
            assert ours == original or ours == sorted(read_theirs(), key=repr)
    assert refused > count / 3


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("make", WITHOUT)
def test_damaged_lists_of_labels_are_refused_in_one_line_or_read(make, count, folder):
    data, path = make(folder)
    errors = [ours for ours in damaged(data, path, count, f"{make.__name__} {count}") if isinstance(ours, str)]
    assert len(errors) > count / 3
    assert not any("\n" in error for error in errors)
