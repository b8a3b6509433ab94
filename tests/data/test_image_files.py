"""Order of image files: natural for predictions, frozen for training."""

import io

import numpy as np
import pytest
from PIL import Image

from vitrail.data.image_files import find_images, list_images
from vitrail.data.sources.registry import open_data

NAMES = ("2.png", "10.png", "1.png", "b 9.png", "b 10.png")
NATURAL = ["1.png", "2.png", "10.png", "b 9.png", "b 10.png"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in NAMES:
        Image.new("L", (8, 8)).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("argument", [".", "*.png", "-"])
def test_files_of_folders_and_patterns_are_in_natural_order(folder, argument, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{folder}\n".encode())))
    assert [path.rpartition("/")[2] for path in find_images([argument], stdin=True)] == NATURAL


def test_named_files_keep_the_order_of_the_user(folder):
    assert find_images(["10.png", "2.png"]) == ["10.png", "2.png"]


def test_order_of_training_images_and_classes_is_that_of_every_earlier_version(folder, tmp_path):
    assert [path.rpartition("/")[2] for path in list_images([folder])] == sorted(NAMES)
    for label in ("10", "9", "1"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for name in NAMES:
            Image.fromarray(np.full((8, 8), int(label), np.uint8)).save(tmp_path / "data" / label / name)
    dataset = open_data(tmp_path / "data")
    assert dataset.labels == ("1", "10", "9")
    assert [path.rpartition("/")[2] for path in dataset.first_split.images[:5]] == sorted(NAMES)
