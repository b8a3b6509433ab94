"""The interface of data sources."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset, Split

# The names that folders and tables give to splits.
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


class Source(ABC):
    """One form of DATA. `vitrail --help` imports the modules of built-in sources, so these import numpy and other large
    packages in the methods."""

    description: ClassVar[str]
    """Description in the help and in errors, such as "a folder of idx files"."""
    word: ClassVar[str] = ""
    """Its name, if it is not a path."""
    is_folder_of_files: ClassVar[bool] = False
    """Whether it is a folder of image files, which may also be meant as such, without classes."""

    @abstractmethod
    def recognises(self, data: str | Path) -> bool:
        """Whether `data`, any string or path, is of this kind."""

    @abstractmethod
    def open(self, data: str | Path) -> "Dataset":
        """Open recognised data. Image files are listed, not read."""

    def open_images(self, data: str | Path, split: str | None) -> "Split":
        """The images of recognised data whose labels do not matter, of the given split or as `for_evaluation`."""
        return self.open(data).for_evaluation(split)
