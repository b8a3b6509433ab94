"""Arrays of numbers in a MATLAB 5 file, the format of some published labels (the documented "MAT-File Level 5")."""

import struct
import zlib
from typing import TYPE_CHECKING

from vitrail.errors import DamagedError

if TYPE_CHECKING:
    import numpy as np

_MATRIX, _COMPRESSED = 14, 15
_KINDS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MOST = 2**26  # bytes of unpacked labels


def read_matlab(content: bytes, name: str) -> dict[str, "np.ndarray"]:
    """The arrays of numbers by their names, flat. Messages call the file `name`."""
    try:
        order = {b"IM": "<", b"MI": ">"}[content[126:128]]
        return dict(_matrices(content[128:], order))
    except Exception as error:  # a damaged file raises whatever its parser meets
        raise DamagedError(path=name, cause=f"cannot be read as a MATLAB 5 file ({type(error).__name__})") from None


def _elements(content: bytes, order: str) -> "list[tuple[int, bytes]]":
    """The kind and the bytes of each element; small ones have both in their tag."""
    found, at = [], 0
    while at + 8 <= len(content):
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

    found = []
    for kind, inside in _elements(content, order):
        if kind == _COMPRESSED:
            found += _matrices(zlib.decompressobj().decompress(inside, _MOST), order)
        elif kind == _MATRIX:
            _, _, (_, name), *data = _elements(inside, order)  # flags, dimensions, name, numbers
            if data and data[0][0] in _KINDS:
                found.append((name.decode(), np.frombuffer(data[0][1], order + _KINDS[data[0][0]])))
    return found
