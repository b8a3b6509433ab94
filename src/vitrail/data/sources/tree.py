"""Trees of files, on disk or in an archive, and the base class of data sources that read them."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from vitrail.core.errors import CorruptFileError
from vitrail.data.image_files import SUFFIXES, is_folder, list_images, subfolders
from vitrail.data.sources.base import Source

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

_MAX_TEXT = 2**28  # bytes of a list of labels or another text file


class Tree(ABC):
    """Files in folders. Paths are relative to the root, with slashes; "" is the root. Hidden files are left out."""

    name: str
    """Name of the root in messages."""

    @abstractmethod
    def folders(self, path: str = "") -> list[str]:
        """Return the names of the folders in a folder."""

    @abstractmethod
    def files(self, path: str = "") -> list[str]:
        """Return the names of the files in a folder; none if the folder does not exist."""

    @abstractmethod
    def images(self, path: str = "") -> list[str]:
        """Return the image files in a folder at any depth, sorted, as a `Split` stores them."""

    @abstractmethod
    def image(self, path: str) -> str:
        """Return an image file as a `Split` stores it. It need not exist: reading a missing file raises an error."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""

    @abstractmethod
    def below(self, name: str) -> Self:
        """Return the tree whose root is a folder in this root."""

    @abstractmethod
    def walk(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the full path of every folder and the names of its files; on disk, including hidden files."""

    def has(self, path: str) -> bool:
        """Return whether a file exists."""
        folder, _, name = path.rpartition("/")
        return name in self.files(folder)

    def full(self, path: str) -> str:
        """Return a path as messages show it, with the root."""
        return f"{self.name}/{path}" if path else self.name

    def text(self, path: str) -> str:
        """Return the text of a file in UTF-8, such as a list of labels."""
        if self.size(path) > _MAX_TEXT:
            raise CorruptFileError(path=self.full(path), cause=f"must have at most {_MAX_TEXT:,} bytes")
        try:
            return self.read(path).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise CorruptFileError(path=self.full(path), cause="must be text in UTF-8") from None


class Folder(Tree):
    """A folder on disk."""

    def __init__(self, root: str | Path) -> None:
        self.root, self.name = Path(root), str(root)

    def folders(self, path: str = "") -> list[str]:
        return subfolders(self.root / path)

    def files(self, path: str = "") -> list[str]:
        if not is_folder(self.root / path):
            return []
        with os.scandir(self.root / path) as entries:
            return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file())

    def images(self, path: str = "") -> list[str]:
        return list_images([self.root / path])

    def image(self, path: str) -> str:
        return str(self.root / path)

    def size(self, path: str) -> int:
        return (self.root / path).stat().st_size

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def below(self, name: str) -> Self:
        return type(self)(self.root / name)

    def walk(self) -> Iterator[tuple[str, list[str]]]:
        return ((folder, names) for folder, _, names in os.walk(str(self.root)))

    def full(self, path: str) -> str:
        return str(self.root / path)


class FolderLayout(Source):
    """A data set with a certain layout of files and folders, on disk or in an archive."""

    is_distributed: ClassVar[bool] = True
    """Whether this is a published data set. It may then also be the only folder of DATA, where torchvision puts it."""

    @abstractmethod
    def fits(self, tree: Tree) -> bool:
        """Return whether a tree has this layout."""

    @abstractmethod
    def read(self, tree: Tree) -> "Dataset":
        """Read the data set of a tree with this layout."""

    def find(self, tree: Tree) -> Tree | None:
        """Return the tree, or the tree of its only folder, if it has this layout; otherwise None."""
        candidates = [tree]
        if self.is_distributed and len(folders := tree.folders()) == 1:
            candidates.append(tree.below(folders[0]))
        return next((candidate for candidate in candidates if self.fits(candidate)), None)

    def recognises(self, data: str | Path) -> bool:
        return is_folder(data) and self.find(Folder(data)) is not None

    def open(self, data: str | Path) -> "Dataset":
        return self.read(self.find(Folder(data)) or Folder(data))


def is_image(name: str) -> bool:
    """Return whether a file name has the extension of an image."""
    return name.rpartition(".")[2].lower() in SUFFIXES
