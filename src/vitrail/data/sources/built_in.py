"""Data sets that are opened by name: embedded data sets, and Fashion-MNIST where it is installed."""

import dataclasses
import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.core.errors import UsageError
from vitrail.data.sources.base import Source
from vitrail.data.sources.idx import IdxFolder, read_idx_folder

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.dataset import Dataset

_FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_FASHION_PACKAGE = Path("/usr/share/datasets/fashion-mnist")  # folder of Debian's package dataset-fashion-mnist


class BuiltIn(Source):
    """Base class of a data set that is opened by its name. The name takes precedence over a path of the same name."""

    def recognises(self, data: str | Path) -> bool:
        return data == self.word


class Digits(BuiltIn):
    """1,797 handwritten digits of 8 x 8 pixels (see NOTICE). The test split has a fifth of them, 36 of each class."""

    word = description = "digits"

    def open(self, data: str | Path) -> "Dataset":
        import numpy as np

        from vitrail.core import rng
        from vitrail.data.dataset import Dataset, Split

        arrays = _read_embedded("digits.npz")
        labels = arrays["labels"].astype(np.int64)
        order = rng.permutation(len(labels), 0, stream="digits")
        # The test set has 36 images of each digit, about a fifth.
        test = np.sort(np.concatenate([order[labels[order] == digit][:36] for digit in range(10)]))
        digits = Split("all", arrays["images"], labels)
        splits = {
            "train": digits.select(np.setdiff1d(np.arange(len(labels)), test), "train"),
            "test": digits.select(test, "test"),
        }
        return Dataset(self.word, tuple("0123456789"), splits, licence="cc-by-4.0")


class Fashion40(BuiltIn):
    """Four test images of each class of Fashion-MNIST (see NOTICE). No embedded model was trained on them."""

    word = description = "fashion-40"

    def open(self, data: str | Path) -> "Dataset":
        arrays = _read_embedded("fashion-40.npz")
        return _fashion_dataset({"test_images": arrays["images"], "test_labels": arrays["labels"]}, self.word)


class FashionMnist(BuiltIn):
    """60,000 and 10,000 grey images of clothes, 28 x 28 (arXiv 1708.07747)."""

    word = description = "fashion-mnist"

    def open(self, data: str | Path) -> "Dataset":
        folders = [_FASHION_PACKAGE]
        if root := os.environ.get("VITRAIL_DATA"):
            folders = [Path(root) / "fashion-mnist", Path(root), *folders]
        for folder in folders:
            if IdxFolder().recognises(folder):
                return _fashion_dataset(read_idx_folder(folder), self.word)
        raise UsageError(
            "Data 'fashion-mnist' must be installed first: on Debian `apt install dataset-fashion-mnist`; elsewhere put"
            " its four idx files into a folder fashion-mnist and set VITRAIL_DATA to the folder above."
        )


def _read_embedded(name: str) -> dict[str, "np.ndarray"]:
    """Read the arrays of an .npz file of the package."""
    import numpy as np

    with resources.files("vitrail.data.sources").joinpath(name).open("rb") as file, np.load(file) as arrays:
        return dict(arrays)


def _fashion_dataset(arrays: dict[str, "np.ndarray"], name: str) -> "Dataset":
    """Build a data set from arrays of Fashion-MNIST, with its class names and licence."""
    import numpy as np

    from vitrail.data.sources.arrays import dataset_from_arrays

    dataset = dataset_from_arrays({**arrays, "classes": np.array(_FASHION_CLASSES)}, name)
    return dataclasses.replace(dataset, licence="mit")
