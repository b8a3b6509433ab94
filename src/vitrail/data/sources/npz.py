"""Source of data: an .npz file of images and labels."""

from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.data.image_files import is_file
from vitrail.data.sources.base import Source

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset, Split


class NpzFile(Source):
    """Source of data: an .npz file of `images` and `labels`, or `train_images` ... `test_labels`; optionally
    `classes`, the class names."""

    description = "a .npz file of images and labels"

    def recognises(self, data: str | Path) -> bool:
        return is_file(data, ".npz")

    def open(self, data: str | Path) -> "Dataset":
        from vitrail.core import array_files
        from vitrail.data.sources.arrays import dataset_from_arrays

        return dataset_from_arrays(array_files.read_arrays(Path(data)), str(data))

    def open_images(self, data: str | Path, split: str | None) -> "Split":
        """Return the images of a split; a file with `images` alone is also accepted."""
        from vitrail.core import array_files
        from vitrail.data.sources.arrays import dataset_from_arrays, unlabelled

        arrays = array_files.read_arrays(Path(data))
        if split is None and "images" in arrays and "labels" not in arrays:
            return unlabelled(arrays["images"], str(data))
        return dataset_from_arrays(arrays, str(data)).for_evaluation(split)
