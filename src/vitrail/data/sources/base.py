"""Base class of data sources, which open DATA of one form."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset, Split

# Names of splits in folders and tables, and the split that each means.
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
    """Base class of a source of data: it recognises and opens one form of DATA.

    `vitrail --help` imports the modules of built-in sources. So they import numpy and other large packages only inside
    their methods.
    """

    description: ClassVar[str]
    """Description in the help and in errors, such as "a folder of idx files"."""
    word: ClassVar[str] = ""
    """Name of the data set, if users open it by name instead of by path."""
    is_folder_of_files: ClassVar[bool] = False
    """Whether DATA is a folder of image files, which can also be used as images without classes."""

    @abstractmethod
    def recognises(self, data: str | Path) -> bool:
        """Return whether this source can open `data`, which is any string or path."""

    @abstractmethod
    def open(self, data: str | Path) -> "Dataset":
        """Open data that this source recognises. Image files are listed, not read."""

    def open_images(self, data: str | Path, split: str | None) -> "Split":
        """Return the images of a split (by default as `Dataset.for_evaluation`) where labels are not needed."""
        return self.open(data).for_evaluation(split)
