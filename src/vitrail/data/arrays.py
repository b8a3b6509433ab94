"""Data that is pixels already: idx files as MNIST has them, npz files, and the two built-in sets."""

import dataclasses
import gzip
import os
import re
import struct
import zipfile
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from vitrail import chance
from vitrail.data.dataset import SPLITS, Dataset, Split
from vitrail.errors import DamagedError, UsageError

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
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        _refuse_more_than_memory(size, path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: _read_member(file, name) for name in file.files}
    except DamagedError:
        raise
    except Exception as error:  # a damaged archive raises what its parsers raise
        raise DamagedError(f"{str(path)!r} cannot be read as npz ({_reason(error)}).") from None
    return _from_arrays(arrays, str(path))


def _read_member(file: NpzFile, name: str) -> np.ndarray:
    try:
        array = file[name]
    except Exception as error:
        raise ValueError(f"{name}: {_reason(error)}") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is no array")
    return array


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
    labels = [part if part.dtype.kind == "U" else part.astype(np.int64) for part in labels]
    if len({part.dtype.kind for part in labels}) > 1:
        raise DamagedError(f"{name!r} has labels that are numbers in one split and names in another.")
    together = np.concatenate(labels)
    if classes is not None:
        names = classes.tolist() if classes.ndim == 1 and classes.dtype.kind == "U" else []
        if not names or len(set(names)) < len(names):
            raise DamagedError(f"classes must be a list of names that differ, got {classes.dtype} in {name!r}.")
        if together.dtype.kind == "U" or together.min() < 0 or together.max() >= len(names):
            raise DamagedError(
                f"Labels must be numbers below {len(names)}, the number of names in classes, in {name!r}."
            )
        order = sorted(range(len(names)), key=names.__getitem__)
        place = np.argsort(order)
        return tuple(names[index] for index in order), [place[part].astype(np.int64) for part in labels]
    values = np.unique(together)
    return tuple(str(value) for value in values), [np.searchsorted(values, part).astype(np.int64) for part in labels]


def _read_idx(path: Path) -> np.ndarray:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or kind != 8 or not 1 <= dimensions <= 4:
                raise ValueError("it does not begin as an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            size = int(np.prod(shape, dtype=object))
            _refuse_more_than_memory(size, path)
            levels = file.read(size)
            if len(levels) != size or file.read(1):
                relation = "fewer" if len(levels) < size else "more"
                raise ValueError(f"its header promises {size:,} bytes of pixels or labels, it has {relation}")
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"{str(path)!r} cannot be read ({_reason(error)}).") from None
    return np.frombuffer(levels, np.uint8).reshape(shape)


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _refuse_more_than_memory(size: int, path: Path) -> None:
    """A small compressed file may promise more than the machine holds."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise DamagedError(f"{str(path)!r} would fill {size:,} bytes; this machine has {memory:,}.")


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
