"""Archives of folders: .zip and .tar are read in place, .tar.gz is unpacked once to a .tar in the cache.

An archive may come from anywhere. Nothing is written under a name that it states, no link is followed, and memory is
checked before a file is unpacked. Damage is found where `zipfile` and `tarfile` find it, and at the end of a .tar.
"""

import contextlib
import copy
import dataclasses
import fcntl
import gzip
import hashlib
import os
import shutil
import tarfile
import threading
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Self

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, first_line
from vitrail.core.files import atomic_file, user_folder
from vitrail.core.memory import check_unpacked_size
from vitrail.core.zip_files import open_zip
from vitrail.data.image_files import is_file
from vitrail.data.sources.base import SPLIT_NAMES, Source
from vitrail.data.sources.registry import all_sources
from vitrail.data.sources.tree import FolderLayout, Tree, is_image

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

_CHUNK = 2**20
_BLOCK = 512  # bytes of a header in a .tar; its files fill whole blocks
_DEEPEST = 100  # folders within folders
_SUSPICIOUS = 200  # how much more a .tar.gz may unpack to, once it is large
_LARGE = 2**30
_SPARE_DISK = 2**29  # bytes that unpacking leaves free


class Archive(Tree):
    """The files of an archive. `name` is what messages call it; `prefix` is the folder in it that is the root."""

    def __init__(self, path: str | Path, name: str = "", prefix: str = "") -> None:
        self.path, self.prefix = Path(path), prefix
        self.name = name or str(path)
        self._files: dict[str, list[str]] = {}
        self._folders: dict[str, list[str]] = {"": []}
        try:
            status = self.path.stat()
            self.bytes, self.time = status.st_size, status.st_mtime_ns
            for member in self._list():
                self._add(member)
        except VitrailError:
            raise
        except Exception as error:  # a damaged archive raises what its parsers raise
            raise self._damaged(first_line(error)) from None

    def __reduce__(self) -> tuple[type[Self], tuple[Path, str, str]]:
        return type(self), (self.path, self.name, self.prefix)

    @abstractmethod
    def _list(self) -> Iterator[str]:
        """The names of all files and (with a slash at the end) folders, checked."""

    @abstractmethod
    def _read(self, member: str) -> bytes:
        """The bytes of a file."""

    @abstractmethod
    def _size(self, member: str) -> int:
        """The size of a file."""

    def folders(self, path: str = "") -> list[str]:
        return self._folders.get(self._at(path), [])

    def files(self, path: str = "") -> list[str]:
        return sorted(self._files.get(self._at(path), []))

    def images(self, path: str = "") -> list[str]:
        return sorted(self._walk(path))

    def image(self, path: str) -> str:
        from vitrail.data.decode import StoredImage

        return StoredImage(self.full(path), self, path)

    def size(self, path: str) -> int:
        return self._size(self.prefix + path)

    def read(self, path: str) -> bytes:
        try:
            check_unpacked_size(self.size(path), Path(self.full(path)))
            return self._read(self.prefix + path)
        except CorruptFileError:
            raise
        except KeyError:
            raise CorruptFileError(path=self.full(path), cause="is missing") from None
        except Exception as error:  # what the parsers raise
            raise CorruptFileError(path=self.full(path), cause=f"cannot be read ({first_line(error)})") from None

    def below(self, name: str) -> Self:
        other = copy.copy(self)
        other.prefix, other.name = f"{self.prefix}{name}/", f"{self.name}/{name}"
        return other

    def walk(self) -> Iterator[tuple[str, list[str]]]:
        for folder, names in self._files.items():
            if f"{folder}/".startswith(self.prefix):
                yield self.full(folder[len(self.prefix) :]), names

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__ |= self.__dict__
        return other

    def _at(self, path: str) -> str:
        """A folder by its path in the archive."""
        return (self.prefix + path).removesuffix("/")

    def _walk(self, path: str) -> Iterator[str]:
        within = f"{path}/" if path else ""
        for name in self._files.get(self._at(path), []):
            if is_image(name):
                yield self.image(within + name)
        for name in self.folders(path):
            yield from self._walk(within + name)

    def _add(self, member: str) -> None:
        """Enter a name into the folders, unless it or one of its folders is hidden, or it is the root."""
        parts = member.removesuffix("/").split("/")
        if any(not part or part.startswith(".") or part == "__MACOSX" for part in parts):
            return
        folder = ""
        for part in parts if member.endswith("/") else parts[:-1]:
            inside = f"{folder}/{part}" if folder else part
            if inside not in self._folders:
                self._folders[inside] = []
                self._folders[folder].append(part)
            folder = inside
        if not member.endswith("/"):
            self._files.setdefault(folder, []).append(parts[-1])

    def _clean(self, name: str) -> str:
        """A name with slashes, without the empty parts and dots that programs write; "" is the root."""
        name = name.replace("\\", "/")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts:
            raise self._damaged(f"{name[:200]!r} would lie outside of it")
        if len(parts) > _DEEPEST:
            raise self._damaged(f"{name[:200]!r} is nested too deeply")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise self._damaged(f"the name {name[:200]!r} is not Unicode") from None
        return "/".join(parts)

    def _damaged(self, reason: str) -> CorruptFileError:
        return CorruptFileError(path=self.name, cause=f"cannot be read as an archive ({reason})")


class ZipTree(Archive):
    """A .zip file, read in place. Every file is checked against its CRC-32."""

    def _list(self) -> Iterator[str]:
        self._zip = open_zip(self.path)
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            name = self._decode(info)
            self._infos[self._clean(name) + ("/" if name.endswith(("/", "\\")) else "")] = info
        if sum(info.compress_size for info in self._infos.values()) > self.bytes:
            raise self._damaged("its files overlap")
        yield from self._infos

    def _decode(self, info: zipfile.ZipInfo) -> str:
        """A name. Some programs write UTF-8 without saying so, and zipfile then takes it for an old code page."""
        if info.flag_bits & 0x800 or info.filename.isascii():
            return info.filename
        try:
            return info.filename.encode("cp437").decode()
        except UnicodeError:
            raise self._damaged(f"the name {info.filename[:200]!r} is not Unicode") from None

    def _read(self, member: str) -> bytes:
        info = self._infos[member]
        with self._zip.open(info) as file:
            return file.read(info.file_size + 1)  # without a size, all of it is unpacked, whatever it states

    def _size(self, member: str) -> int:
        return self._infos[member].file_size


class _Descriptor:
    """An open file, which threads read at any place, until nobody needs it."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.number)


class _Place(NamedTuple):
    """Where a file lies in a .tar."""

    start: int
    size: int


class TarTree(Archive):
    """A .tar file, read in place."""

    def _list(self) -> Iterator[str]:
        self._places: dict[str, _Place] = {}
        self._file = _Descriptor(self.path)
        end = -1
        with tarfile.open(self.path, "r:") as archive:
            for info in archive:
                if info.offset <= end or info.size < 0:  # reading on would never end
                    raise ValueError("its headers lead backwards")
                end = info.offset
                name = self._clean(info.name)
                if info.isdir():
                    yield f"{name}/"
                    continue
                if not info.isreg() or info.issparse():
                    raise ValueError(f"{name[:200]!r} is a link or another special file")
                if name not in self._places:
                    yield name
                self._places[name] = _Place(info.offset_data, info.size)
            mark = os.pread(self._file.number, _BLOCK, archive.offset)
            # tarfile takes a damaged header, and the end of a file that was cut off, for the end of the archive.
            if mark != bytes(_BLOCK):
                raise ValueError(f"it is damaged or cut off at byte {archive.offset:,}")

    def _read(self, member: str) -> bytes:
        place = self._places[member]
        content = bytearray()
        while len(content) < place.size:
            piece = os.pread(self._file.number, place.size - len(content), place.start + len(content))
            if not piece:
                raise ValueError(f"it states {place.size:,} bytes, it has {len(content):,}")
            content += piece
        return bytes(content)

    def _size(self, member: str) -> int:
        return self._places[member].size


class ArchiveFile(Source):
    """A .zip, .tar, .tar.gz or .tgz of a folder of any layout, perhaps within one folder in it."""

    description = "a .zip, .tar or .tar.gz of such a folder"

    def recognises(self, data: str | Path) -> bool:
        return any(is_file(data, ending) for ending in (".zip", ".tar", ".tar.gz", ".tgz"))

    def open(self, data: str | Path) -> "Dataset":
        name, notes = str(data), ()
        if is_file(data, ".zip"):
            tree = ZipTree(data)
        elif is_file(data, ".tar"):
            tree = TarTree(data)
        else:
            tree, notes = unpack_once(Path(data))
        try:
            dataset = self._read(tree)
        except VitrailError:
            if notes:  # it has just been unpacked, in vain
                tree.path.unlink(missing_ok=True)
            raise
        return dataclasses.replace(dataset, name=name, notes=(*notes, *dataset.notes))

    def _read(self, tree: Archive) -> "Dataset":
        while len(inside := tree.folders()) == 1 and not tree.files() and _is_wrapper(tree, inside[0]):
            tree = tree.below(inside[0])
        layouts = (source for source in all_sources() if isinstance(source, FolderLayout))
        fitting = ((layout, layout.find(tree)) for layout in layouts)
        layout, place = next((layout, place) for layout, place in fitting if place is not None)
        return layout.read(place)


def _is_wrapper(tree: Tree, name: str) -> bool:
    """Whether a folder only wraps the data set: it is neither a split nor a class of images."""
    if name.lower() in SPLIT_NAMES:
        return False
    return bool(tree.folders(name)) or not all(map(is_image, tree.files(name)))


_UNPACKING = threading.Lock()


def unpack_once(path: Path) -> tuple[TarTree, tuple[str, ...]]:
    """The tree of a .tar.gz, unpacked to a .tar in the cache if it is not there yet, and a note that says so. It is
    known by its path, size, time and end, where gzip has a checksum of all."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        end = os.pread(file.fileno(), 8, max(0, status.st_size - 8))
    stamp = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape") + end
    kept = user_folder() / "archives" / f"{hashlib.sha256(stamp).hexdigest()[:32]}.tar"
    with _UNPACKING:
        if kept.is_file():
            # The unpacked copy may have been cut off since, while the archive itself is complete.
            with contextlib.suppress(CorruptFileError):
                return TarTree(kept, str(path)), ()
        _remove_leftovers(kept.parent)
        with atomic_file(kept, force=True) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = _inflate(path, file, status.st_size)
            file.flush()
            tree = TarTree(f"/dev/fd/{file.fileno()}", str(path))  # refused before it is kept
    tree.path = kept
    return tree, (f"{path.name} is unpacked once into {str(kept)!r} ({size:,} bytes)",)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes were unpacking. Whoever still writes a file holds its lock; an empty one may be so
    new that its writer has yet to take it."""
    for path in folder.glob(".*.tar.writing-*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:
                path.unlink()


def _inflate(path: Path, file: BinaryIO, packed: int) -> int:
    """Unpack a gzip file, but not more than there is room for, nor what only a bomb would unpack to."""
    free = max(0, shutil.disk_usage(file.fileno()).free - _SPARE_DISK)
    most, size = max(_LARGE, _SUSPICIOUS * packed), 0
    try:
        with gzip.open(path) as source:
            while piece := source.read(_CHUNK):
                size += len(piece)
                if size > free:
                    raise UsageError(
                        f"Cache must have room for {str(path)!r}, which unpacks to more than the {free:,} bytes that"
                        f" are free in {str(user_folder())!r}. Set VITRAIL_HOME to a folder with more."
                    )
                if size > most:
                    raise ValueError(f"it unpacks to over {_SUSPICIOUS} times its size")
                file.write(piece)
    except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
        if isinstance(error, VitrailError):
            raise
        raise CorruptFileError(path=path, cause=f"cannot be read as an archive ({first_line(error)})") from None
    return size
