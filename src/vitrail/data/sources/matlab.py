"""Arrays of numbers in a MATLAB 5 file, the format of some published labels (the documented "MAT-File Level 5")."""

import math
import struct
import zlib
from typing import TYPE_CHECKING

from vitrail.core.errors import CorruptFileError

if TYPE_CHECKING:
    import numpy as np

_MATRIX, _COMPRESSED = 14, 15
_KINDS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMBERS = range(6, 16)  # the classes of arrays of real numbers, from double to uint64
_COMPLEX = 0x800
_MOST = 2**24  # bytes of unpacked labels, in all
_MANY = 1000  # elements in a file, or in one of its elements


def read_matlab(content: bytes, name: str) -> dict[str, "np.ndarray"]:
    """The arrays of numbers by their names, flat. Messages call the file `name`."""
    try:
        order = {b"\0\1IM": "<", b"\1\0MI": ">"}[content[124:128]]  # version 1 of the format
        arrays = _matrices(content[128:], order)
    except Exception as error:  # a damaged file raises whatever its parser meets
        raise CorruptFileError(path=name, cause=f"cannot be read as a MATLAB 5 file ({type(error).__name__})") from None
    found = dict(arrays)
    if len(found) < len(arrays):
        raise CorruptFileError(path=name, cause="must have one array of each name")
    return found


def _elements(content: bytes, order: str) -> "list[tuple[int, bytes]]":
    """The kind and the bytes of each element; small ones have both in their tag."""
    found, at = [], 0
    while at < len(content):
        if len(found) == _MANY:
            raise ValueError("there are too many elements")
        kind, size = struct.unpack_from(f"{order}II", content, at)
        if kind >> 16:
            kind, size, start, end = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            start = at + 8
            end = start + size + (0 if kind == _COMPRESSED else -size % 8)
        if start + size > min(end, len(content)):
            raise ValueError("an element is cut off")
        found.append((kind, content[start : start + size]))
        at = end
    return found


def _matrices(content: bytes, order: str) -> "list[tuple[str, np.ndarray]]":
    """The arrays of numbers with their names; whatever else an array may hold is left out."""
    found, left = [], _MOST
    for kind, element in _elements(content, order):
        if kind == _COMPRESSED:
            unpacker = zlib.decompressobj()
            unpacked = unpacker.decompress(element, left + 1)
            left -= len(unpacked)
            if left < 0 or not unpacker.eof or unpacker.unused_data:  # only at its end its checksum is known
                raise ValueError("it unpacks to too much, or not to its end")
            ((kind, element),) = _elements(unpacked, order)
        if kind != _MATRIX:
            raise ValueError("an element is no array")
        (_, flags), (_, shape), (_, name), *data = _elements(element, order)
        sort = struct.unpack(f"{order}II", flags)[0]
        if sort & 0xFF in _NUMBERS:
            found.append((name.decode(), _numbers(data, shape, order, is_complex=bool(sort & _COMPLEX))))
    return found


def _numbers(data: "list[tuple[int, bytes]]", shape: bytes, order: str, *, is_complex: bool) -> "np.ndarray":
    import numpy as np

    ((kind, content),) = data
    numbers = np.frombuffer(content, order + _KINDS[kind])
    if is_complex or len(numbers) != math.prod(np.frombuffer(shape, f"{order}i4").tolist()):
        raise ValueError("an array has not the size that it states")
    return numbers
