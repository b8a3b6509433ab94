"""Build data sets from arrays of images and labels."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.data.dataset import SPLITS, Dataset, Split

_MAX_CLASSES = 10_000_000
_MAX_LABEL = np.iinfo(np.int64).max


def dataset_in_memory(data: Any) -> Dataset:
    """Build a data set from a pair (images, labels) or from a mapping of arrays with the names of an .npz file.

    In a pair, images are pixels or paths of files.
    """
    arrays: dict[str, Any]
    match data:
        case Mapping():
            arrays = {str(name): array for name, array in data.items()}
        case [images, labels] if isinstance(data, tuple | list):
            arrays = {"images": images, "labels": labels}
        case _:
            raise UsageError(
                "Data must be a path, a pair (images, labels), a mapping of arrays or a Dataset, got"
                f" {type(data).__name__}."
            )
    if {"images", "labels"} <= arrays.keys() and are_paths(arrays["images"]):
        return _dataset_of_files([os.fspath(path) for path in arrays["images"]], _as_array("labels", arrays["labels"]))
    return dataset_from_arrays({name: _as_array(name, array) for name, array in arrays.items()}, "arrays")


def are_paths(images: Any) -> bool:
    """Return whether images are paths of files, in a list, an array or a column of a table."""
    is_list = isinstance(images, list | tuple) or getattr(images, "ndim", None) == 1
    return is_list and len(images) > 0 and all(isinstance(image, str | os.PathLike) for image in images)


def _dataset_of_files(paths: list[str], labels: np.ndarray) -> Dataset:
    """Build a data set from the paths of image files and their labels."""
    _check_labels(labels, "labels", len(paths), "arrays")
    if missing := [path for path in paths if not os.path.exists(path)]:  # noqa: PTH110 - there may be millions
        raise UsageError(f"Images must be files that exist, got {missing[0]!r}.")
    names, (indices,) = _class_table([labels], None, "arrays")
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])  # noqa: PTH100, PTH120
    return Dataset("files", names, {"all": Split("all", paths, indices)}, root=root)


def _as_array(name: str, values: Any) -> np.ndarray:
    """Convert a list, a tensor or a column of a table into an array; strings become numpy's fixed-width strings."""
    try:
        array = np.asarray(values)
        if array.dtype.kind in "OT" and all(isinstance(element, str) for element in array.ravel()):
            array = array.astype(str)
    except (ValueError, TypeError, RuntimeError):
        raise UsageError(f"{name} must be one array, got {type(values).__name__} of several shapes or types.") from None
    return array


def dataset_from_arrays(arrays: dict[str, np.ndarray], name: str) -> Dataset:
    """Build a data set from the arrays `images` and `labels`, or `train_images` ... `test_labels`.

    The optional array `classes` has the names of integer labels. Messages call the data set `name`.
    """
    keys = {split: (f"{split}_images", f"{split}_labels") for split in SPLITS}
    if "images" in arrays:
        if mixed := [key for pair in keys.values() for key in pair if key in arrays]:
            raise UsageError(
                f"Arrays must be either images and labels or those of splits, got {mixed[0]}, too, in {name!r}."
            )
        keys = {"all": ("images", "labels")}
    pairs = {}
    for split, (images_key, labels_key) in keys.items():
        if (images_key in arrays) != (labels_key in arrays):
            raise CorruptFileError(path=name, cause=f"has only one of {images_key} and {labels_key}")
        if images_key in arrays:
            pairs[split] = (_check_images(arrays[images_key], images_key, name), arrays[labels_key])
    if not pairs:
        raise UsageError(
            f"Arrays must be called images and labels, or train_images ... test_labels, got"
            f" {', '.join(sorted(arrays)) or 'none'} in {name!r}."
        )
    shapes = {images.shape[1:] for images, _ in pairs.values()}
    if len(shapes) > 1:
        raise CorruptFileError(path=name, cause=f"has images of different shapes in its splits: {sorted(shapes)}")
    for split, (images, labels) in pairs.items():
        _check_labels(labels, keys[split][1], len(images), name)
    table, indices = _class_table([labels for _, labels in pairs.values()], arrays.get("classes"), name)
    splits = {
        split: Split(split, images, index) for (split, (images, _)), index in zip(pairs.items(), indices, strict=True)
    }
    return Dataset(name, table, splits)


def unlabelled(images: np.ndarray, name: str) -> Split:
    """Build a split of images without labels. Every image gets class 0."""
    pixels = _check_images(images, "images", name)
    return Split("all", pixels, np.zeros(len(pixels), np.int64))


def pixels_in_memory(images: Any) -> np.ndarray:
    """Return the pixels of an array or a tensor of several images, uint8 (n, height, width, channels)."""
    return _check_images(_as_array("images", images), "images", "arrays")


def _check_labels(labels: np.ndarray, key: str, count: int, name: str) -> None:
    """Raise UsageError unless there is an integer or a name for each of `count` images."""
    if labels.shape != (count,) or labels.dtype.kind not in "iuU" or not len(labels):
        raise UsageError(
            f"{key} must have an integer or a name for each image, got {labels.dtype} of shape {labels.shape} for"
            f" {count} images in {name!r}."
        )


def _check_images(images: np.ndarray, key: str, name: str) -> np.ndarray:
    """Return images as (n, height, width, channels). Raises UsageError for another type or shape."""
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
    """Return the sorted class names (numbers by value), and the labels of every split as indices into them."""
    # Find the distinct labels of each split first: joining all labels would copy them.
    distinct = [np.unique(part) for part in labels]
    if any(part.dtype.kind == "u" and part[-1] > _MAX_LABEL for part in distinct):
        raise CorruptFileError(
            f"Labels must be names or integers up to {_MAX_LABEL:,}, got larger ones in {name!r}.", path=name
        )
    distinct = [part if part.dtype.kind == "U" else part.astype(np.int64) for part in distinct]
    if len({part.dtype.kind for part in distinct}) > 1:
        raise CorruptFileError(path=name, cause="has labels that are numbers in one split and names in another")
    values = np.unique(np.concatenate(distinct))
    if len(values) > _MAX_CLASSES:
        raise CorruptFileError(f"Classes must be at most {_MAX_CLASSES:,}, got {len(values):,} in {name!r}.", path=name)
    if classes is not None:
        is_list = classes.ndim == 1 and classes.dtype.kind == "U" and len(classes) <= _MAX_CLASSES
        names = _check_class_names(classes, name) if is_list else []
        if not names or len(set(names)) < len(names):
            raise CorruptFileError(
                f"classes must be a list of names that differ, got {classes.dtype} in {name!r}.",
                path=name,
            )
        if values.dtype.kind == "U" or values[0] < 0 or values[-1] >= len(names):
            raise CorruptFileError(
                f"Labels must be numbers below {len(names)}, the number of names in classes, in {name!r}.",
                path=name,
            )
        order = sorted(range(len(names)), key=names.__getitem__)
        rank = np.argsort(order)
        return tuple(names[index] for index in order), [rank[part] for part in labels]
    table = _check_class_names(values, name) if values.dtype.kind == "U" else map(str, values)
    return tuple(table), [np.searchsorted(values, part.astype(values.dtype, copy=False)) for part in labels]


def _check_class_names(texts: np.ndarray, name: str) -> list[str]:
    """Return class names as strings. Raises CorruptFileError if a name is empty or not Unicode."""
    try:
        names = texts.tolist()
        "".join(names).encode()
    except (ValueError, SystemError):  # arrays may hold numbers that are not Unicode code points
        names = [""]
    if "" in names:
        raise CorruptFileError(
            f"Names of classes must be texts in Unicode, and not empty, got others in {name!r}.", path=name
        )
    return names
