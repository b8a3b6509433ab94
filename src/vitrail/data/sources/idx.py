"""A folder of idx files, the format of MNIST."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.core.errors import UsageError
from vitrail.data.image_files import is_folder
from vitrail.data.sources.base import Source

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.dataset import Dataset

_NAME = re.compile(r"(?P<set>.*?)(?P<split>train|t10k|test)-(?P<what>images|labels)[-.]idx\d-ubyte(\.gz)?")


class IdxFolder(Source):
    """`train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-...`, with or without `.gz`."""

    description = "a folder of idx files"

    def recognises(self, data: str | Path) -> bool:
        return _folder_of(data) is not None

    def open(self, data: str | Path) -> "Dataset":
        from vitrail.data.sources.arrays import dataset_from_arrays

        return dataset_from_arrays(read_idx_folder(_folder_of(data) or Path(data)), str(data))


def _folder_of(data: str | Path) -> Path | None:
    """The folder of the files: the given one or, as torchvision puts it, `raw` in it or in a folder in it."""
    if not is_folder(data):
        return None
    for place in (Path(data), *sorted(Path(data).glob("raw")), *sorted(Path(data).glob("*/raw"))):
        if place.is_dir() and any(_NAME.fullmatch(path.name) for path in place.iterdir()):
            return place
    return None


def read_idx_folder(folder: Path) -> dict[str, "np.ndarray"]:
    """The arrays of a folder: `train_images`, `train_labels`, `test_images`, `test_labels`."""
    from vitrail.core import array_files

    found: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir()):
        if match := _NAME.fullmatch(path.name):
            key = ("train" if match["split"] == "train" else "test", match["what"])
            if key in found and found[key].name.removesuffix(".gz") != path.name.removesuffix(".gz"):
                raise UsageError(
                    f"Folder of idx files must hold one set, got {found[key].name} and {path.name} in {str(folder)!r}."
                )
            found.setdefault(key, path)
    return {f"{split}_{what}": array_files.read_idx(path) for (split, what), path in found.items()}
