"""What every source of data answers."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

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
    """One kind of DATA. `vitrail --help` imports its module to describe it: import numpy and the like where needed."""

    description: ClassVar[str]
    """What it is, as the help and the errors list it: "a folder of idx files"."""
    word: ClassVar[str] = ""
    """The word that stands for it, if it is not a path."""

    @abstractmethod
    def recognises(self, data: str | Path) -> bool:
        """Whether `data` is of this kind, for any text and path."""

    @abstractmethod
    def open(self, data: str | Path) -> "Dataset":
        """The images and labels of what was recognised. Image files are listed, not read."""
