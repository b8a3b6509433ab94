"""Archives of folders: .zip and .tar are read in place, .tar.gz is unpacked once to a .tar in the cache.

An archive may be hostile. No file is written under a name from the archive, no link is followed, and memory is checked
before a file is unpacked. Corruption is detected where `zipfile` and `tarfile` detect it, and at the end of a .tar.
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

_READ_BYTES = 2**20
_TAR_BLOCK = 512  # bytes of a header in a .tar; files are padded to multiples of it
_MAX_DEPTH = 100  # of nested folders
_MAX_RATIO = 200  # unpacked size / packed size of a .tar.gz that unpacks to more than _MIN_BOMB bytes
_MIN_BOMB = 2**30  # bytes
_SPARE_DISK = 2**29  # bytes that unpacking leaves free


class Archive(Tree):
    """The files of an archive. `name` is its name in messages; `prefix` is the folder in it that is the root."""

    def __init__(self, path: str | Path, name: str = "", prefix: str = "") -> None:
        self.path, self.prefix = Path(path), prefix
        self.name = name or str(path)
        self._files: dict[str, list[str]] = {}
        self._folders: dict[str, list[str]] = {"": []}
        try:
            status = self.path.stat()
            self.bytes, self.time = status.st_size, status.st_mtime_ns
            for member in self._list_members():
                self._add_member(member)
        except VitrailError:
            raise
        except Exception as error:  # the parsers of a corrupt archive raise exceptions of any type
            raise self._corrupt_archive_error(first_line(error)) from None

    def __reduce__(self) -> tuple[type[Self], tuple[Path, str, str]]:
        return type(self), (self.path, self.name, self.prefix)

    @abstractmethod
    def _list_members(self) -> Iterator[str]:
        """Yield the checked names of all files and folders; names of folders end with a slash."""

    @abstractmethod
    def _read_member(self, member: str) -> bytes:
        """Return the bytes of a file."""

    @abstractmethod
    def _member_size(self, member: str) -> int:
        """Return the size of a file in bytes."""

    def folders(self, path: str = "") -> list[str]:
        return self._folders.get(self._member_folder(path), [])

    def files(self, path: str = "") -> list[str]:
        return sorted(self._files.get(self._member_folder(path), []))

    def images(self, path: str = "") -> list[str]:
        return sorted(self._walk_images(path))

    def image(self, path: str) -> str:
        from vitrail.data.decode import StoredImage

        return StoredImage(self.full(path), self, path)

    def size(self, path: str) -> int:
        return self._member_size(self.prefix + path)

    def read(self, path: str) -> bytes:
        try:
            check_unpacked_size(self.size(path), Path(self.full(path)))
            return self._read_member(self.prefix + path)
        except CorruptFileError:
            raise
        except KeyError:
            raise CorruptFileError(path=self.full(path), cause="is missing") from None
        except Exception as error:  # the parsers raise exceptions of any type
            raise CorruptFileError(path=self.full(path), cause=f"cannot be read ({first_line(error)})") from None

    def below(self, name: str) -> Self:
        subtree = copy.copy(self)
        subtree.prefix, subtree.name = f"{self.prefix}{name}/", f"{self.name}/{name}"
        return subtree

    def walk(self) -> Iterator[tuple[str, list[str]]]:
        for folder, names in self._files.items():
            if f"{folder}/".startswith(self.prefix):
                yield self.full(folder[len(self.prefix) :]), names

    def __copy__(self) -> Self:
        archive = object.__new__(type(self))
        archive.__dict__ |= self.__dict__
        return archive

    def _member_folder(self, path: str) -> str:
        """Return the path in the archive of a folder in this tree."""
        return (self.prefix + path).removesuffix("/")

    def _walk_images(self, path: str) -> Iterator[str]:
        parent = f"{path}/" if path else ""
        for name in self._files.get(self._member_folder(path), []):
            if is_image(name):
                yield self.image(parent + name)
        for name in self.folders(path):
            yield from self._walk_images(parent + name)

    def _add_member(self, member: str) -> None:
        """Add a file or folder to the listing, unless it or one of its folders is hidden, or it is the root."""
        parts = member.removesuffix("/").split("/")
        if any(not part or part.startswith(".") or part == "__MACOSX" for part in parts):
            return
        folder = ""
        for part in parts if member.endswith("/") else parts[:-1]:
            subfolder = f"{folder}/{part}" if folder else part
            if subfolder not in self._folders:
                self._folders[subfolder] = []
                self._folders[folder].append(part)
            folder = subfolder
        if not member.endswith("/"):
            self._files.setdefault(folder, []).append(parts[-1])

    def _normalise_name(self, name: str) -> str:
        """Return a name with slashes and without empty parts and dots; "" is the root. Unsafe names are rejected."""
        name = name.replace("\\", "/")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts:
            raise self._corrupt_archive_error(f"{name[:200]!r} would lie outside of it")
        if len(parts) > _MAX_DEPTH:
            raise self._corrupt_archive_error(f"{name[:200]!r} is nested too deeply")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise self._corrupt_archive_error(f"the name {name[:200]!r} is not Unicode") from None
        return "/".join(parts)

    def _corrupt_archive_error(self, reason: str) -> CorruptFileError:
        """Return the error to raise for an archive that cannot be read."""
        return CorruptFileError(path=self.name, cause=f"cannot be read as an archive ({reason})")


class ZipTree(Archive):
    """A .zip file, read in place. `zipfile` checks the CRC-32 of every file."""

    def _list_members(self) -> Iterator[str]:
        self._zip = open_zip(self.path)
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            name = self._decode_name(info)
            self._infos[self._normalise_name(name) + ("/" if name.endswith(("/", "\\")) else "")] = info
        if sum(info.compress_size for info in self._infos.values()) > self.bytes:
            raise self._corrupt_archive_error("its files overlap")
        yield from self._infos

    def _decode_name(self, info: zipfile.ZipInfo) -> str:
        """Return the name of a file. Names in UTF-8 without the flag for it are decoded again: zipfile uses CP437."""
        if info.flag_bits & 0x800 or info.filename.isascii():
            return info.filename
        try:
            return info.filename.encode("cp437").decode()
        except UnicodeError:
            raise self._corrupt_archive_error(f"the name {info.filename[:200]!r} is not Unicode") from None

    def _read_member(self, member: str) -> bytes:
        info = self._infos[member]
        with self._zip.open(info) as file:
            return file.read(info.file_size + 1)  # without a limit, a file that states a false size would fill memory

    def _member_size(self, member: str) -> int:
        return self._infos[member].file_size


class _SharedDescriptor:
    """File descriptor that threads share for reads at any offset. It is closed with the last reference."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.number)


class _Extent(NamedTuple):
    """Offset and size of a file in a .tar, in bytes."""

    start: int
    size: int


class TarTree(Archive):
    """A .tar file, read in place."""

    def _list_members(self) -> Iterator[str]:
        """Yield the names of members, and record the place of each file in the archive."""
        self._extents: dict[str, _Extent] = {}
        self._file = _SharedDescriptor(self.path)
        end = -1
        with tarfile.open(self.path, "r:") as archive:
            for info in archive:
                if info.offset <= end or info.size < 0:  # otherwise the loop would never end
                    raise ValueError("its headers lead backwards")
                end = info.offset
                name = self._normalise_name(info.name)
                if info.isdir():
                    yield f"{name}/"
                    continue
                if not info.isreg() or info.issparse():
                    raise ValueError(f"{name[:200]!r} is a link or another special file")
                if name not in self._extents:
                    yield name
                self._extents[name] = _Extent(info.offset_data, info.size)
            end_mark = os.pread(self._file.number, _TAR_BLOCK, archive.offset)
            # tarfile mistakes a corrupt header, or the end of a truncated file, for the end of the archive.
            if end_mark != bytes(_TAR_BLOCK):
                raise ValueError(f"it is corrupt or truncated at byte {archive.offset:,}")

    def _read_member(self, member: str) -> bytes:
        start, size = self._extents[member]
        content = bytearray()
        while len(content) < size:
            piece = os.pread(self._file.number, size - len(content), start + len(content))
            if not piece:
                raise ValueError(f"it states {size:,} bytes, it has {len(content):,}")
            content += piece
        return bytes(content)

    def _member_size(self, member: str) -> int:
        return self._extents[member].size


class ArchiveFile(Source):
    """Source of data: a .zip, .tar, .tar.gz or .tgz of a folder with any layout.

    Outer folders that contain only one folder are skipped.
    """

    description = "a .zip, .tar or .tar.gz of one of these folders"

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
            dataset = self._read_tree(tree)
        except VitrailError:
            if notes:  # do not keep an unpacked file that cannot be read
                tree.path.unlink(missing_ok=True)
            raise
        return dataclasses.replace(dataset, name=name, notes=(*notes, *dataset.notes))

    def _read_tree(self, tree: Archive) -> "Dataset":
        """Read a data set by the first layout that its tree has."""
        while len(folders := tree.folders()) == 1 and not tree.files() and _is_wrapper(tree, folders[0]):
            tree = tree.below(folders[0])
        layouts = (source for source in all_sources() if isinstance(source, FolderLayout))
        candidates = ((layout, layout.find(tree)) for layout in layouts)
        layout, root = next((layout, root) for layout, root in candidates if root is not None)
        return layout.read(root)


def _is_wrapper(tree: Tree, name: str) -> bool:
    """Return whether a folder only wraps the data set: it is neither a split nor a class of images."""
    if name.lower() in SPLIT_NAMES:
        return False
    return bool(tree.folders(name)) or not all(map(is_image, tree.files(name)))


_UNPACK_LOCK = threading.Lock()


def unpack_once(path: Path) -> tuple[TarTree, tuple[str, ...]]:
    """Return the tree of a .tar.gz and, if the archive was unpacked now, a note.

    The archive is unpacked to a .tar in the user's cache unless it is there already. Its key is the path, size, time
    and last 8 bytes of the file, where gzip has its checksum.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        end = os.pread(file.fileno(), 8, max(0, status.st_size - 8))
    stamp = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape") + end
    cached = user_folder() / "archives" / f"{hashlib.sha256(stamp).hexdigest()[:32]}.tar"
    with _UNPACK_LOCK:
        if cached.is_file():
            # The unpacked copy may have been cut off since, while the archive itself is complete.
            with contextlib.suppress(CorruptFileError):
                return TarTree(cached, str(path)), ()
        _remove_leftovers(cached.parent)
        with atomic_file(cached, force=True) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = _unpack_gzip(path, file, status.st_size)
            file.flush()
            tree = TarTree(f"/dev/fd/{file.fileno()}", str(path))  # checked before it enters the cache
    tree.path = cached
    return tree, (f"{path.name} is unpacked once into {str(cached)!r} ({size:,} bytes)",)


def _remove_leftovers(folder: Path) -> None:
    """Remove the partial .tar files that killed processes left in the cache.

    A running process holds the lock of its file. An empty file is kept: its process may not have taken the lock yet.
    """
    for path in folder.glob(".*.tar.writing-*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:
                path.unlink()


def _unpack_gzip(path: Path, file: BinaryIO, packed: int) -> int:
    """Unpack a gzip file of `packed` bytes and return its unpacked size.

    Raises an error if the disk is too small, or if the ratio of the sizes shows a decompression bomb.
    """
    free = max(0, shutil.disk_usage(file.fileno()).free - _SPARE_DISK)
    limit, size = max(_MIN_BOMB, _MAX_RATIO * packed), 0
    try:
        with gzip.open(path) as source:
            while piece := source.read(_READ_BYTES):
                size += len(piece)
                if size > free:
                    raise UsageError(
                        f"Cache must have room for {str(path)!r}, which unpacks to more than the {free:,} bytes that"
                        f" are free in {str(user_folder())!r}. Set VITRAIL_HOME to a folder with more."
                    )
                if size > limit:
                    raise ValueError(f"it unpacks to over {_MAX_RATIO} times its size")
                file.write(piece)
    except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
        if isinstance(error, VitrailError):
            raise
        raise CorruptFileError(path=path, cause=f"cannot be read as an archive ({first_line(error)})") from None
    return size
