"""A tree of files, on disk or in an archive, as the sources of folders see it."""

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

_MOST = 2**28  # bytes of a list of labels or of other small files


class Tree(ABC):
    """Files in folders. Paths are relative to its root, with slashes; "" is the root. Hidden files are left out."""

    name: str
    """What messages call it."""

    @abstractmethod
    def folders(self, path: str = "") -> list[str]:
        """Names of the folders in a folder."""

    @abstractmethod
    def files(self, path: str = "") -> list[str]:
        """Names of the files in a folder; empty if there is no such folder."""

    @abstractmethod
    def images(self, path: str = "") -> list[str]:
        """The images in a folder, at any depth, sorted: what a `Split` has."""

    @abstractmethod
    def image(self, path: str) -> str:
        """An image file: what a `Split` has. It is missing only when it is read."""

    @abstractmethod
    def size(self, path: str) -> int:
        """The size of a file in bytes."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The bytes of a file."""

    @abstractmethod
    def below(self, name: str) -> Self:
        """The tree of a folder in the root."""

    @abstractmethod
    def walk(self) -> Iterator[tuple[str, list[str]]]:
        """Every folder, as messages call it, and the names of the files in it; on disk, hidden ones, too."""

    def has(self, path: str) -> bool:
        """Whether there is such a file."""
        folder, _, name = path.rpartition("/")
        return name in self.files(folder)

    def full(self, path: str) -> str:
        """A path in messages."""
        return f"{self.name}/{path}" if path else self.name

    def text(self, path: str) -> str:
        """A small file of text."""
        if self.size(path) > _MOST:
            raise CorruptFileError(path=self.full(path), cause=f"must have at most {_MOST:,} bytes")
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
        return ((place, names) for place, _, names in os.walk(str(self.root)))

    def full(self, path: str) -> str:
        return str(self.root / path)


class FolderLayout(Source):
    """A data set in a folder, which may be on disk or in an archive."""

    is_distributed: ClassVar[bool] = True
    """Whether it is a published data set, which may also lie in the only folder of a folder, as torchvision puts it."""

    @abstractmethod
    def fits(self, tree: Tree) -> bool:
        """Whether a tree looks like this layout."""

    @abstractmethod
    def read(self, tree: Tree) -> "Dataset":
        """The data set of a tree that fits."""

    def find(self, tree: Tree) -> Tree | None:
        """The tree itself, or that of its only folder, if it fits."""
        places = [tree]
        if self.is_distributed and len(inside := tree.folders()) == 1:
            places.append(tree.below(inside[0]))
        return next((place for place in places if self.fits(place)), None)

    def recognises(self, data: str | Path) -> bool:
        return is_folder(data) and self.find(Folder(data)) is not None

    def open(self, data: str | Path) -> "Dataset":
        return self.read(self.find(Folder(data)) or Folder(data))


def is_image(name: str) -> bool:
    """Whether a file has the extension of an image."""
    return name.rpartition(".")[2].lower() in SUFFIXES
