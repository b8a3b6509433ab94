"""Arrays from untrusted files: sizes are checked against the available memory before anything is unpacked, and nothing
is copied."""

import contextlib
import gzip
import math
import struct
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy

from vitrail.core.errors import CorruptFileError, first_line
from vitrail.core.memory import check_unpacked_size
from vitrail.core.zip_files import open_zip

_CHUNK = 2**18


class _Header(NamedTuple):
    """Header of an array in an archive."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    offset: int
    """Where its data begin."""

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def read_npz(
    path: Path, takes: Callable[[np.dtype], bool] = lambda dtype: True, *, beside: int = 0
) -> dict[str, np.ndarray | None]:
    """The arrays of an npz file by name; None for those of a dtype that the caller does not take. `beside` is how many
    more bytes the caller will need for each element.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with open_zip(path) as archive:
            headers = {member.filename: _read_header(archive, member) for member in archive.infolist()}
            wanted = {name: header for name, header in headers.items() if takes(header.dtype)}
            size = sum(header.numbers * (header.dtype.itemsize + beside) for header in wanted.values())
            check_unpacked_size(size, path)
            return {
                name.removesuffix(".npy"): _read_array(archive, name, header) if name in wanted else None
                for name, header in headers.items()
            }
    except CorruptFileError:
        raise
    except Exception as error:  # a damaged archive raises what its parsers raise
        raise CorruptFileError(path=path, cause=f"cannot be read as npz ({first_line(error)})") from None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file by name."""
    return {name: array for name, array in read_npz(path).items() if array is not None}


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array in an idx file, compressed (`.gz`) or not."""
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or kind != 8 or not 1 <= dimensions <= 4:
                raise ValueError("it does not begin as an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            check_unpacked_size(math.prod(shape), path)
            levels = np.empty(shape, np.uint8)
            read_into(levels, file)
            if file.read(1):
                raise ValueError(f"its header states {levels.size:,} bytes, it has more")
    except CorruptFileError:
        raise
    except Exception as error:  # a damaged file raises what its parsers raise
        raise CorruptFileError(path=path, cause=f"cannot be read ({first_line(error)})") from None
    return levels


class Readable(Protocol):
    """A file of bytes, compressed or not."""

    def read(self, size: int, /) -> bytes: ...


def read_into(array: np.ndarray, file: Readable) -> None:
    """Fill an array from a file, in chunks."""
    levels = array.reshape(-1).view(np.uint8)
    for start in range(0, len(levels), _CHUNK):
        piece = file.read(min(_CHUNK, len(levels) - start))
        if len(piece) < min(_CHUNK, len(levels) - start):
            raise ValueError(f"its header states {len(levels):,} bytes, it has fewer")
        levels[start : start + len(piece)] = np.frombuffer(piece, np.uint8)


@contextlib.contextmanager
def _member(archive: zipfile.ZipFile, name: str) -> Generator[IO[bytes]]:
    """Open a file of an archive; any error names it."""
    try:
        with archive.open(name) as file:
            yield file
    except Exception as error:  # what its parsers raise
        raise ValueError(f"{name.removesuffix('.npy')}: {first_line(error)}") from None


def _read_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Header:
    with _member(archive, member.filename) as file:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(npy.read_magic(file))
        if not member.filename.endswith(".npy") or read is None:
            raise ValueError("it is no array")
        header = _Header(*read(file), offset=file.tell())
        if header.dtype.hasobject:
            raise ValueError("it holds Python objects, which are not read")
        size = header.numbers * header.dtype.itemsize
        if size != member.file_size - header.offset or (header.numbers and not size):
            raise ValueError(f"its header states {size:,} bytes, it has others")
    return header


def _read_array(archive: zipfile.ZipFile, name: str, header: _Header) -> np.ndarray:
    array = np.empty(header.shape[::-1] if header.is_fortran else header.shape, header.dtype)
    with _member(archive, name) as file:
        file.read(header.offset)
        read_into(array, file)
    return array.T if header.is_fortran else array
