"""CIFAR-10 and CIFAR-100 as their author distributes them: the binary version and the Python version.

The Python version consists of pickles. They are opened in the sandbox (`core.sandbox.read_arrays`).
"""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitrail.core.errors import CorruptFileError
from vitrail.core.memory import check_unpacked_size
from vitrail.data.sources.tree import FolderLayout, Tree

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.dataset import Dataset

_PIXELS = 3 * 32 * 32
_PARTS = tuple(f"data_batch_{number}" for number in range(1, 6))


class _CifarVersion(NamedTuple):
    """File names and layout of a published version of CIFAR-10 or CIFAR-100."""

    name: str
    training: tuple[str, ...]
    test: str
    names: str
    """File of the class names."""
    key: str
    """Key of the labels in the Python version."""
    names_key: str
    """Key of the class names in the Python version."""
    classes: int
    label_bytes: int
    """Bytes before the pixels of an image in the binary version; the last of them is the class."""

    @property
    def is_binary(self) -> bool:
        return self.test.endswith(".bin")

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.training, self.test, self.names)


_CIFAR_VERSIONS = (
    _CifarVersion("CIFAR-10", _PARTS, "test_batch", "batches.meta", "labels", "label_names", 10, 0),
    _CifarVersion(
        "CIFAR-10", tuple(f"{part}.bin" for part in _PARTS), "test_batch.bin", "batches.meta.txt", "labels", "", 10, 1
    ),
    _CifarVersion("CIFAR-100", ("train",), "test", "meta", "fine_labels", "fine_label_names", 100, 0),
    _CifarVersion("CIFAR-100", ("train.bin",), "test.bin", "fine_label_names.txt", "fine_labels", "", 100, 2),
)


class Cifar(FolderLayout):
    """The files of `cifar-10-batches-py`, `cifar-10-batches-bin`, `cifar-100-python` or `cifar-100-binary`."""

    description = "CIFAR-10 or CIFAR-100 as distributed"

    def fits(self, tree: Tree) -> bool:
        return _find_version(tree) is not None

    def read(self, tree: Tree) -> "Dataset":
        import dataclasses

        import numpy as np

        from vitrail.data.sources.arrays import dataset_from_arrays

        version = _find_version(tree)
        if version is None or (missing := [name for name in version.files if not tree.has(name)]):
            raise CorruptFileError(path=tree.name, cause=f"is incomplete: {', '.join(missing)} is missing")
        check_unpacked_size(2 * sum(tree.size(name) for name in version.files), Path(tree.name))
        read_file = _read_binary_file if version.is_binary else _read_pickle_file
        parts = [read_file(tree, name, version) for name in version.training]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        test_images, test_labels = read_file(tree, version.test, version)
        if version.is_binary:
            names = [line.strip() for line in tree.text(version.names).split("\n") if line.strip()]
        else:
            names = _read_sandboxed_pickle(tree, version.names)[1].get(version.names_key, [])
        if len(names) != version.classes:  # a missing or additional line would shift the names of all later classes
            raise CorruptFileError(
                path=tree.full(version.names), cause=f"must have {version.classes} names of classes, got {len(names)}"
            )
        if unprintable := next((name for name in names if not name.isprintable()), None):
            raise CorruptFileError(
                path=tree.full(version.names), cause=f"must have names that can be read, got {unprintable!r}"
            )
        arrays = {
            "train_images": images,
            "train_labels": labels,
            "test_images": test_images,
            "test_labels": test_labels,
            "classes": np.array(names),
        }
        language = "binary" if version.is_binary else "Python"
        counts = f"{len(images):,} training and {len(test_images):,} test images"
        note = f"read as {version.name}, {language} version: {counts}"
        return dataclasses.replace(dataset_from_arrays(arrays, tree.name), notes=(note,))


def _find_version(tree: Tree) -> _CifarVersion | None:
    """Return the version of CIFAR whose files a folder has; a part of the training files may be missing."""
    files = set(tree.files())
    return next(
        (version for version in _CIFAR_VERSIONS if {version.training[0], version.test, version.names} <= files), None
    )


def _read_binary_file(tree: Tree, name: str, version: _CifarVersion) -> tuple["np.ndarray", "np.ndarray"]:
    """Return the images and labels of a file of the binary version."""
    import numpy as np

    content = np.frombuffer(tree.read(name), np.uint8)
    row_bytes = version.label_bytes + _PIXELS
    if not len(content) or len(content) % row_bytes:
        raise CorruptFileError(
            path=tree.full(name), cause=f"must have {row_bytes:,} bytes for each image, got {len(content):,} in all"
        )
    rows = content.reshape(-1, row_bytes)
    return _rows_to_images(rows[:, version.label_bytes :]), rows[:, version.label_bytes - 1].astype(np.int64)


def _read_pickle_file(tree: Tree, name: str, version: _CifarVersion) -> tuple["np.ndarray", "np.ndarray"]:
    """Return the images and labels of a file of the Python version."""
    import numpy as np

    arrays, _ = _read_sandboxed_pickle(tree, name)
    pixels, labels = arrays.get("data"), arrays.get(version.key)
    if (
        pixels is None
        or labels is None
        or pixels.dtype != np.uint8
        or pixels.shape != (len(labels), _PIXELS)
        or labels.dtype.kind not in "iu"
    ):
        raise CorruptFileError(
            path=tree.full(name), cause=f"must have data, {_PIXELS:,} bytes for each image, and {version.key}"
        )
    return _rows_to_images(pixels), labels.astype(np.int64)


def _read_sandboxed_pickle(tree: Tree, name: str) -> tuple[dict[str, "np.ndarray"], dict[str, list[str]]]:
    """Return the arrays and the lists of strings of a pickle by name. It is opened in the sandbox."""
    from vitrail.core import array_files
    from vitrail.core.sandbox import read_arrays
    from vitrail.core.sandbox.convert_pickle import convert_pickle

    reader = Path(read_arrays.__file__)
    with tempfile.TemporaryDirectory(prefix="vitrail-pickle-") as folder:
        source, target = Path(folder) / "pickle", Path(folder) / "arrays.npz"
        source.write_bytes(tree.read(name))
        report = convert_pickle(reader, source, target, expected="plain data", name=tree.full(name))
        arrays = {key: array for key, array in array_files.read_npz(target).items() if array is not None}
    return arrays, report["texts"]


def _rows_to_images(pixels: "np.ndarray") -> "np.ndarray":
    """Reshape rows of all red, all green and all blue levels into images with channels last."""
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy()
