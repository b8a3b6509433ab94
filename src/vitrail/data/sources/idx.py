"""Source of data: a folder of idx files, the format of MNIST."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.core.errors import UsageError
from vitrail.data.image_files import is_folder
from vitrail.data.sources.base import Source

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.dataset import Dataset

_IDX_NAME = re.compile(r"(?P<set>.*?)(?P<split>train|t10k|test)-(?P<content>images|labels)[-.]idx\d-ubyte(\.gz)?")


class IdxFolder(Source):
    """`train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-...`, with or without `.gz`."""

    description = "a folder of idx files"

    def recognises(self, data: str | Path) -> bool:
        return _find_idx_folder(data) is not None

    def open(self, data: str | Path) -> "Dataset":
        from vitrail.data.sources.arrays import dataset_from_arrays

        return dataset_from_arrays(read_idx_folder(_find_idx_folder(data) or Path(data)), str(data))


def _find_idx_folder(data: str | Path) -> Path | None:
    """Return the folder of the idx files: `data`, `data/raw` or `data/*/raw`, where torchvision puts them."""
    if not is_folder(data):
        return None
    for folder in (Path(data), *sorted(Path(data).glob("raw")), *sorted(Path(data).glob("*/raw"))):
        if folder.is_dir() and any(_IDX_NAME.fullmatch(path.name) for path in folder.iterdir()):
            return folder
    return None


def read_idx_folder(folder: Path) -> dict[str, "np.ndarray"]:
    """Read the arrays `train_images`, `train_labels`, `test_images` and `test_labels` of a folder."""
    from vitrail.core import array_files

    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if match := _IDX_NAME.fullmatch(path.name):
            key = f"{'train' if match['split'] == 'train' else 'test'}_{match['content']}"
            if key in files and files[key].name.removesuffix(".gz") != path.name.removesuffix(".gz"):
                raise UsageError(
                    f"Folder of idx files must hold one set, got {files[key].name} and {path.name} in {str(folder)!r}."
                )
            files.setdefault(key, path)
    return {key: array_files.read_idx(path) for key, path in files.items()}
