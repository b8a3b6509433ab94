"""Reader of numeric arrays in MATLAB 5 files ("MAT-File Level 5"), in which some data sets publish their labels."""

import math
import struct
import zlib
from typing import TYPE_CHECKING

from vitrail.core.errors import CorruptFileError

if TYPE_CHECKING:
    import numpy as np

_MATRIX, _COMPRESSED = 14, 15
_DTYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMERIC = range(6, 16)  # array classes of real numbers, from double to uint64
_COMPLEX = 0x800
_MAX_BYTES = 2**24  # of all unpacked elements together
_MAX_ELEMENTS = 1000  # in a file, or in one of its elements


def read_matlab(content: bytes, name: str) -> dict[str, "np.ndarray"]:
    """Return the numeric arrays by name, flattened. Messages call the file `name`."""
    try:
        order = {b"\0\1IM": "<", b"\1\0MI": ">"}[content[124:128]]  # byte order; version 1 of the format
        pairs = _read_arrays(content[128:], order)
    except Exception as error:  # a corrupt file raises exceptions of any type
        raise CorruptFileError(path=name, cause=f"cannot be read as a MATLAB 5 file ({type(error).__name__})") from None
    arrays = dict(pairs)
    if len(arrays) < len(pairs):
        raise CorruptFileError(path=name, cause="must have one array of each name")
    return arrays


def _read_elements(content: bytes, order: str) -> "list[tuple[int, bytes]]":
    """Return the data type and the bytes of each element. A small element has its bytes within its 8-byte tag."""
    elements, start = [], 0
    while start < len(content):
        if len(elements) == _MAX_ELEMENTS:
            raise ValueError("there are too many elements")
        data_type, size = struct.unpack_from(f"{order}II", content, start)
        if data_type >> 16:
            data_type, size, data_start, end = data_type & 0xFFFF, data_type >> 16, start + 4, start + 8
        else:
            data_start = start + 8
            end = data_start + size + (0 if data_type == _COMPRESSED else -size % 8)
        if data_start + size > min(end, len(content)):
            raise ValueError("an element is cut off")
        elements.append((data_type, content[data_start : data_start + size]))
        start = end
    return elements


def _read_arrays(content: bytes, order: str) -> "list[tuple[str, np.ndarray]]":
    """Return the names and values of the numeric arrays; arrays of other classes are ignored."""
    arrays, remaining = [], _MAX_BYTES
    for data_type, element in _read_elements(content, order):
        if data_type == _COMPRESSED:
            unpacker = zlib.decompressobj()
            unpacked = unpacker.decompress(element, remaining + 1)
            remaining -= len(unpacked)
            if remaining < 0 or not unpacker.eof or unpacker.unused_data:  # zlib checks its checksum only at the end
                raise ValueError("it unpacks to too much, or not to its end")
            ((data_type, element),) = _read_elements(unpacked, order)
        if data_type != _MATRIX:
            raise ValueError("an element is not an array")
        (_, flags), (_, shape), (_, name), *data = _read_elements(element, order)
        array_class = struct.unpack(f"{order}II", flags)[0]
        if array_class & 0xFF in _NUMERIC:
            is_complex = bool(array_class & _COMPLEX)
            arrays.append((name.decode(), _read_numbers(data, shape, order, is_complex=is_complex)))
    return arrays


def _read_numbers(data: "list[tuple[int, bytes]]", shape: bytes, order: str, *, is_complex: bool) -> "np.ndarray":
    import numpy as np

    ((data_type, content),) = data
    numbers = np.frombuffer(content, order + _DTYPES[data_type])
    if is_complex or len(numbers) != math.prod(np.frombuffer(shape, f"{order}i4").tolist()):
        raise ValueError("an array does not have the size that it states")
    return numbers
