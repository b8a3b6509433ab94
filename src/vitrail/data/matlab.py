"""Arrays of numbers in a MATLAB 5 file, the format of some published labels (the documented "MAT-File Level 5")."""

import struct
import zlib
from typing import TYPE_CHECKING

from vitrail.errors import DamagedError

if TYPE_CHECKING:
    import numpy as np

_MATRIX, _COMPRESSED = 14, 15
_KINDS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MOST = 2**24  # bytes of unpacked labels, in all
_MANY = 1000  # elements in a file, or in one of its elements


def read_matlab(content: bytes, name: str) -> dict[str, "np.ndarray"]:
    """The arrays of numbers by their names, flat. Messages call the file `name`."""
    try:
        order = {b"IM": "<", b"MI": ">"}[content[126:128]]
        arrays = _matrices(content[128:], order)
    except Exception as error:  # a damaged file raises whatever its parser meets
        raise DamagedError(path=name, cause=f"cannot be read as a MATLAB 5 file ({type(error).__name__})") from None
    found = dict(arrays)
    if len(found) < len(arrays):
        raise DamagedError(path=name, cause="must have one array of each name")
    return found


def _elements(content: bytes, order: str) -> "list[tuple[int, bytes]]":
    """The kind and the bytes of each element; small ones have both in their tag."""
    found, at = [], 0
    while at + 8 <= len(content):
        if len(found) == _MANY:
            raise ValueError("there are too many elements")
        kind, size = struct.unpack_from(f"{order}II", content, at)
        if kind >> 16:
            found.append((kind & 0xFFFF, content[at + 4 : at + 4 + (kind >> 16)]))
            at += 8
            continue
        if at + 8 + size > len(content):
            raise ValueError("an element is cut off")
        found.append((kind, content[at + 8 : at + 8 + size]))
        at += 8 + size + (0 if kind == _COMPRESSED else -size % 8)
    return found


def _matrices(content: bytes, order: str) -> "list[tuple[str, np.ndarray]]":
    import numpy as np

    found, left = [], _MOST
    for kind, element in _elements(content, order):
        parts = [(kind, element)]
        if kind == _COMPRESSED:
            unpacked = zlib.decompressobj().decompress(element, left + 1)
            left -= len(unpacked)
            if left < 0:
                raise ValueError("it unpacks to too much")
            parts = _elements(unpacked, order)
        for inside in (part for sort, part in parts if sort == _MATRIX):
            _, _, (_, name), *data = _elements(inside, order)  # flags, dimensions, name, numbers
            if data and data[0][0] in _KINDS:
                found.append((name.decode(), np.frombuffer(data[0][1], order + _KINDS[data[0][0]])))
    return found
