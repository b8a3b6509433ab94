"""An npz file of images and labels."""

from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.data.base import Source
from vitrail.data.files import is_file

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset


class NpzFile(Source):
    """`images` and `labels`, or `train_images` ... `test_labels`; optional `classes`: the class names."""

    description = "a .npz file of images and labels"

    def recognises(self, data: str | Path) -> bool:
        return is_file(data, ".npz")

    def open(self, data: str | Path) -> "Dataset":
        from vitrail import unpack
        from vitrail.data.arrays import dataset_from_arrays

        arrays = {name: array for name, array in unpack.read_npz(Path(data)).items() if array is not None}
        return dataset_from_arrays(arrays, str(data))
