"""Sandbox reader: converts a pickled dict of arrays, numbers and texts, such as CIFAR's, to an npz file.

The unpickler accepts only numpy arrays, bytes, texts, numbers, lists and dicts. For each function of numpy that a
pickle names, it substitutes a class that only records the arguments, so not even numpy's own code for unpickling runs.
"""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_NUMERIC_DTYPE = re.compile(r"[<>|=]?[iuf][1248]|[?b]1?")


def prepare() -> None:
    """Import numpy before the restrictions of `child.py` apply."""
    import numpy as np  # noqa: F401


def convert(source: Path, target: Path, refuse: Callable[[str], NoReturn]) -> dict[str, Any]:
    """Write the arrays and lists of integers of the pickled dict `source` to `target`; return its lists of texts."""
    import numpy as np

    try:
        with source.open("rb") as file:
            content = Unpickler(file, encoding="bytes").load()
            if file.read(1):
                refuse("there are bytes after its end")
        if not isinstance(content, dict):
            refuse(f"it contains a {type(content).__name__}")
        arrays, texts = {}, {}
        entries = {as_text(key): value for key, value in content.items()}
        if len(entries) < len(content):
            refuse("it has a key twice, as bytes and as text")
        for key, value in entries.items():
            if isinstance(value, Array):
                arrays[key] = value.to_numpy()
            elif isinstance(value, list) and value and all(type(item) is int for item in value):
                arrays[key] = np.array(value, np.int64)
            elif isinstance(value, list) and value and all(isinstance(item, bytes | str) for item in value):
                texts[key] = [as_text(item) for item in value]
        size = sum(array.nbytes for array in arrays.values())
        if size > 4 * source.stat().st_size + 2**20:
            refuse(f"its arrays would fill {size:,} bytes")
        np.savez(target, **arrays)
    except Forbidden as error:
        refuse(f"it asks for {error}")
    except MemoryError:
        refuse("it would fill more memory than is available, or than a file of its size can need")
    except RecursionError:
        refuse("it is nested too deeply")
    except Exception as error:  # the unpickler raises various errors for a corrupt pickle
        refuse(f"it is corrupt: {type(error).__name__}")
    # Lists of file names are long, and no caller uses them.
    return {"texts": {key: value for key, value in texts.items() if len(value) <= 100_000 and "filenames" not in key}}


def as_text(key: bytes | str) -> str:
    """Return a key or a name of a pickle as text; Python 2 wrote bytes."""
    if isinstance(key, bytes):
        return key.decode()
    if not isinstance(key, str):
        raise TypeError("a key that is not text")
    return key


class Forbidden(Exception):
    """A pickle names a function or class that is not one of plain data."""


class Dtype:
    """Substitute for `numpy.dtype` in a pickle."""

    def __init__(self, name: bytes | str, *_: Any) -> None:
        self.name, self.order = as_text(name), "="

    def __setstate__(self, state: Any) -> None:
        order = as_text(state[1])
        self.order = order if order in "<>|=" else "="

    def to_numpy(self) -> Any:
        """Return the dtype. Raise Forbidden unless its values are plain numbers."""
        import numpy as np

        if not _NUMERIC_DTYPE.fullmatch(self.name):
            raise Forbidden(f"an array of {self.name[:20]!r}")
        return np.dtype(self.name).newbyteorder(self.order)  # ty: ignore[invalid-argument-type]


class Array:
    """Substitute for a `numpy.ndarray` in a pickle, which records its shape, dtype, order and bytes."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def to_numpy(self) -> Any:
        """Return the array that the recorded state describes. Raise Forbidden if it contains Python objects."""
        import numpy as np

        _, shape, dtype, is_fortran, content = self.state
        if not isinstance(dtype, Dtype) or not isinstance(content, bytes):
            raise Forbidden("an array of objects")
        return np.frombuffer(content, dtype.to_numpy()).reshape(shape, order="F" if is_fortran else "C")


def array_type(*_: Any) -> NoReturn:
    """Substitute for the type `numpy.ndarray`, which a pickle of arrays names but never calls."""
    raise Forbidden("numpy.ndarray()")


def encode(text: Any, encoding: Any) -> bytes:
    """Substitute for `_codecs.encode`, with which Python 3 writes bytes in old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise Forbidden("another encoding")
    return text.encode("latin1")


_SUBSTITUTES = {
    **{f"numpy{core}.multiarray._reconstruct": Array for core in (".core", "._core")},
    "numpy.ndarray": array_type,
    "numpy.dtype": Dtype,
    "_codecs.encode": encode,
}


class Unpickler(pickle.Unpickler):
    """An unpickler that resolves only the names in `_SUBSTITUTES`."""

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in _SUBSTITUTES:
            raise Forbidden(full_name)
        return _SUBSTITUTES[full_name]
