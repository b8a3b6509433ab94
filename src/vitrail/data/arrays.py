"""Data that is pixels already: idx files as MNIST has them, npz files, and the two built-in sets."""

import dataclasses
import gzip
import math
import os
import re
import struct
from importlib import resources
from pathlib import Path

import numpy as np

from vitrail import chance, unpack
from vitrail.data.dataset import SPLITS, Dataset, Split
from vitrail.errors import DamagedError, UsageError, first_line
from vitrail.memory import refuse_more

_MOST_CLASSES = 10_000_000

BUILT_IN = ("digits", "fashion-40", "fashion-mnist")

_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_FASHION_PACKAGE = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it

_IDX_NAME = re.compile(r"(?P<set>.*?)(?P<split>train|t10k|test)-(?P<what>images|labels)[-.]idx\d-ubyte(\.gz)?")


def built_in(name: str) -> Dataset:
    """`digits`, `fashion-40` or `fashion-mnist`."""
    return {"digits": _digits, "fashion-40": _fashion_40, "fashion-mnist": _fashion_mnist}[name]()


def is_idx_folder(folder: Path) -> bool:
    """Whether a folder has MNIST-style files."""
    return any(_IDX_NAME.fullmatch(path.name) for path in folder.iterdir())


def read_idx_folder(folder: Path) -> Dataset:
    """`train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-...`, each perhaps with `.gz`."""
    return _from_arrays(_idx_arrays(folder), str(folder))


def _idx_arrays(folder: Path) -> dict[str, np.ndarray]:
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir()):
        if match := _IDX_NAME.fullmatch(path.name):
            key = ("train" if match["split"] == "train" else "test", match["what"])
            if key in found and found[key].name.removesuffix(".gz") != path.name.removesuffix(".gz"):
                raise UsageError(
                    f"Folder of idx files must hold one set, got {found[key].name} and {path.name} in {str(folder)!r}."
                )
            found.setdefault(key, path)
    return {f"{split}_{what}": _read_idx(path) for (split, what), path in found.items()}


def read_npz(path: Path) -> Dataset:
    """`images` and `labels`, or `train_images` ... `test_labels`; optional `classes`: the names behind the numbers."""
    arrays = {name: array for name, array in unpack.read_npz(path).items() if array is not None}
    return _from_arrays(arrays, str(path))


def _from_arrays(arrays: dict[str, np.ndarray], name: str) -> Dataset:
    keys = {split: (f"{split}_images", f"{split}_labels") for split in SPLITS}
    if "images" in arrays:
        if mixed := [name for pair in keys.values() for name in pair if name in arrays]:
            raise UsageError(
                f"Arrays must be either images and labels or those of splits, got {mixed[0]}, too, in {name!r}."
            )
        keys = {"all": ("images", "labels")}
    pairs = {}
    for split, (images, labels) in keys.items():
        if (images in arrays) != (labels in arrays):
            raise DamagedError(f"{name!r} has only one of {images} and {labels}.")
        if images in arrays:
            pairs[split] = (_as_pictures(arrays[images], images, name), arrays[labels])
    if not pairs:
        raise UsageError(
            f"Arrays must be called images and labels, or train_images ... test_labels, got"
            f" {', '.join(sorted(arrays)) or 'none'} in {name!r}."
        )
    shapes = {pictures.shape[1:] for pictures, _ in pairs.values()}
    if len(shapes) > 1:
        raise DamagedError(f"{name!r} has pictures of different shapes in its splits: {sorted(shapes)}.")
    for split, (pictures, labels) in pairs.items():
        if labels.shape != (len(pictures),) or labels.dtype.kind not in "iuU" or not len(labels):
            raise UsageError(
                f"{keys[split][1]} must have a whole number or a name for each picture, got {labels.dtype} of shape"
                f" {labels.shape} for {len(pictures)} pictures in {name!r}."
            )
    table, indices = _class_table([labels for _, labels in pairs.values()], arrays.get("classes"), name)
    splits = {
        split: Split(split, pictures, index)
        for (split, (pictures, _)), index in zip(pairs.items(), indices, strict=True)
    }
    return Dataset(name, table, splits)


def _as_pictures(images: np.ndarray, key: str, name: str) -> np.ndarray:
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape:
        raise UsageError(
            f"{key} must be uint8 of shape (n, height, width) or (n, height, width, channels), got {images.dtype} of"
            f" shape {images.shape} in {name!r}."
        )
    if images.ndim == 4 and images.shape[1] in (1, 3, 4) and images.shape[2] == images.shape[3] > 4:
        raise UsageError(f"{key} must have channels last, got shape {images.shape} in {name!r}.")
    return images[..., None] if images.ndim == 3 else images


def _class_table(
    labels: list[np.ndarray], classes: np.ndarray | None, name: str
) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """Names sorted (numbers by value), and every label as an index into them."""
    # Each split's own values first: all labels in one array would be a copy of them.
    distinct = [np.unique(part) for part in labels]
    distinct = [part if part.dtype.kind == "U" else part.astype(np.int64) for part in distinct]
    if len({part.dtype.kind for part in distinct}) > 1:
        raise DamagedError(f"{name!r} has labels that are numbers in one split and names in another.")
    values = np.unique(np.concatenate(distinct))
    if len(values) > _MOST_CLASSES:
        raise DamagedError(f"Classes must be at most {_MOST_CLASSES:,}, got {len(values):,} in {name!r}.")
    if classes is not None:
        is_list = classes.ndim == 1 and classes.dtype.kind == "U" and len(classes) <= _MOST_CLASSES
        names = classes.tolist() if is_list else []
        if not names or len(set(names)) < len(names):
            raise DamagedError(f"classes must be a list of names that differ, got {classes.dtype} in {name!r}.")
        if values.dtype.kind == "U" or values[0] < 0 or values[-1] >= len(names):
            raise DamagedError(
                f"Labels must be numbers below {len(names)}, the number of names in classes, in {name!r}."
            )
        order = sorted(range(len(names)), key=names.__getitem__)
        place = np.argsort(order)
        return tuple(names[index] for index in order), [place[part] for part in labels]
    return tuple(map(str, values)), [np.searchsorted(values, part.astype(values.dtype, copy=False)) for part in labels]


def _read_idx(path: Path) -> np.ndarray:
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or kind != 8 or not 1 <= dimensions <= 4:
                raise ValueError("it does not begin as an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            refuse_more(math.prod(shape), path)
            levels = np.empty(shape, np.uint8)
            unpack.fill(levels, file)
            if file.read(1):
                raise ValueError(f"its header promises {levels.size:,} bytes, it has more")
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"{str(path)!r} cannot be read ({first_line(error)}).") from None
    return levels


def _digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels (see NOTICE); a fifth, 36 of each class, is the test split."""
    with resources.files("vitrail.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    order = chance.permutation(len(labels), 0, draw="digits")
    test = np.sort(np.concatenate([order[labels[order] == digit][:36] for digit in range(10)]))
    table = tuple("0123456789")
    everything = Split("all", images, labels)
    splits = {
        "train": everything.take(np.setdiff1d(np.arange(len(labels)), test), "train"),
        "test": everything.take(test, "test"),
    }
    return Dataset("digits", table, splits, licence="cc-by-4.0")


def _fashion_40() -> Dataset:
    """Four test pictures of each class of Fashion-MNIST (see NOTICE): no embedded model has learned from them."""
    with resources.files("vitrail.data").joinpath("fashion-40.npz").open("rb") as file, np.load(file) as arrays:
        found = {"test_images": arrays["images"], "test_labels": arrays["labels"], "classes": np.array(_FASHION)}
    return dataclasses.replace(_from_arrays(found, "fashion-40"), licence="mit")


def _fashion_mnist() -> Dataset:
    """60,000 and 10,000 grey pictures of clothes, 28 x 28 (arXiv 1708.07747)."""
    places = [_FASHION_PACKAGE]
    if root := os.environ.get("VITRAIL_DATA"):
        places = [Path(root) / "fashion-mnist", Path(root), *places]
    for place in places:
        if place.is_dir() and is_idx_folder(place):
            named = _from_arrays(_idx_arrays(place) | {"classes": np.array(_FASHION)}, "fashion-mnist")
            return dataclasses.replace(named, licence="mit")
    raise UsageError(
        "Data 'fashion-mnist' must be installed first: on Debian `apt install dataset-fashion-mnist`; elsewhere put its"
        " four idx files into a folder fashion-mnist and set VITRAIL_DATA to the folder above."
    )
