"""Read arrays from untrusted npz and idx files.

The size that a header states is checked against the available memory before anything is allocated.
"""

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

_CHUNK = 2**18  # bytes


class _Header(NamedTuple):
    """Header of an array in an npz file."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    offset: int
    """Position of the first byte after the header."""

    @property
    def number_count(self) -> int:
        return math.prod(self.shape)


def read_npz(
    path: Path, is_wanted: Callable[[np.dtype], bool] = lambda dtype: True, *, extra_bytes: int = 0
) -> dict[str, np.ndarray | None]:
    """Return the arrays of an npz file by name; None for each array whose dtype is not wanted.

    Raise CorruptFileError if the file cannot be read or its arrays do not fit into memory. `extra_bytes` is the memory
    that the caller will need for each number besides the array.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with open_zip(path) as archive:
            headers = {member.filename: _read_npz_header(archive, member) for member in archive.infolist()}
            selected = {name: header for name, header in headers.items() if is_wanted(header.dtype)}
            size = sum(header.number_count * (header.dtype.itemsize + extra_bytes) for header in selected.values())
            check_unpacked_size(size, path)
            return {
                name.removesuffix(".npy"): _read_npz_array(archive, name, header) if name in selected else None
                for name, header in headers.items()
            }
    except CorruptFileError:
        raise
    except Exception as error:  # zipfile and zlib raise various errors for a corrupt archive
        raise CorruptFileError(path=path, cause=f"cannot be read as npz ({first_line(error)})") from None


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of an npz file by name. Raise CorruptFileError if it cannot be read."""
    return {name: array for name, array in read_npz(path).items() if array is not None}


def read_idx(path: Path) -> np.ndarray:
    """Return the uint8 array in an idx file, compressed (`.gz`) or not. Raise CorruptFileError if it cannot be read."""
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, type_code, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or type_code != 8 or not 1 <= dimensions <= 4:
                raise ValueError("it does not begin as an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            check_unpacked_size(math.prod(shape), path)
            array = np.empty(shape, np.uint8)
            read_into(array, file)
            if file.read(1):
                raise ValueError(f"its header states {array.size:,} bytes, it has more")
    except CorruptFileError:
        raise
    except Exception as error:  # gzip and struct raise various errors for a corrupt file
        raise CorruptFileError(path=path, cause=f"cannot be read ({first_line(error)})") from None
    return array


class Readable(Protocol):
    """A file of bytes, compressed or not."""

    def read(self, size: int, /) -> bytes: ...


def read_into(array: np.ndarray, file: Readable) -> None:
    """Fill a contiguous array in place with the next bytes of a file. Raise ValueError if they are too few."""
    content = array.reshape(-1).view(np.uint8)
    for start in range(0, len(content), _CHUNK):
        chunk = file.read(min(_CHUNK, len(content) - start))
        if len(chunk) < min(_CHUNK, len(content) - start):
            raise ValueError(f"its header states {len(content):,} bytes, it has fewer")
        content[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)


@contextlib.contextmanager
def _open_npz_member(archive: zipfile.ZipFile, name: str) -> Generator[IO[bytes]]:
    """Open an array of an npz file. An error within the block becomes a ValueError with the name of the array."""
    try:
        with archive.open(name) as file:
            yield file
    except Exception as error:  # zipfile and zlib raise various errors
        raise ValueError(f"{name.removesuffix('.npy')}: {first_line(error)}") from None


def _read_npz_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> _Header:
    with _open_npz_member(archive, member.filename) as file:
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(npy.read_magic(file))
        if not member.filename.endswith(".npy") or read_header is None:
            raise ValueError("it is not an array")
        header = _Header(*read_header(file), offset=file.tell())
        if header.dtype.hasobject:
            raise ValueError("it contains Python objects, which are not read")
        size = header.number_count * header.dtype.itemsize
        if size != member.file_size - header.offset or (header.number_count and not size):
            raise ValueError(f"its header states {size:,} bytes, it has {member.file_size - header.offset:,}")
    return header


def _read_npz_array(archive: zipfile.ZipFile, name: str, header: _Header) -> np.ndarray:
    array = np.empty(header.shape[::-1] if header.is_fortran else header.shape, header.dtype)
    with _open_npz_member(archive, name) as file:
        file.read(header.offset)
        read_into(array, file)
    return array.T if header.is_fortran else array
