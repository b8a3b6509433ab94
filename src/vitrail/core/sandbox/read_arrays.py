"""Sandbox reader: converts a pickled dict of arrays, numbers and texts, such as CIFAR's, to an npz file.

The unpickler knows numpy arrays, bytes, texts, numbers, lists and dicts, and nothing else: where a pickle asks for one
of numpy's functions it gets a stand-in that only records what it is given, so that not even numpy's own code for
unpickling meets the file.
"""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_PLAIN = re.compile(r"[<>|=]?[iuf][1248]|[?b]1?")


def prepare() -> None:
    """Import numpy."""
    import numpy as np  # noqa: F401


def convert(source: Path, target: Path, refuse: Callable[[str], NoReturn]) -> dict[str, Any]:
    """Read `source`, a dict; write its arrays and lists of integers to `target` by key, return its lists of texts."""
    import numpy as np

    try:
        with source.open("rb") as file:
            found = Unpickler(file, encoding="bytes").load()
            if file.read(1):
                refuse("there is more after its end")
        if not isinstance(found, dict):
            refuse(f"it holds a {type(found).__name__}")
        arrays, texts = {}, {}
        named = {as_text(key): value for key, value in found.items()}
        if len(named) < len(found):
            refuse("it has a key twice, as bytes and as text")
        for key, value in named.items():
            if isinstance(value, Array):
                arrays[key] = value.array()
            elif isinstance(value, list) and value and all(type(one) is int for one in value):
                arrays[key] = np.array(value, np.int64)
            elif isinstance(value, list) and value and all(isinstance(one, bytes | str) for one in value):
                texts[key] = [as_text(one) for one in value]
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
    except Exception as error:  # whatever the unpickler meets
        refuse(f"it is damaged: {type(error).__name__}")
    # Lists of file names are as long as the arrays, and nobody needs them.
    return {"texts": {key: value for key, value in texts.items() if len(value) <= 100_000 and "filenames" not in key}}


def as_text(word: bytes | str) -> str:
    """A key or a name as text; Python 2 wrote bytes."""
    if isinstance(word, bytes):
        return word.decode()
    if not isinstance(word, str):
        raise TypeError("a key that is no text")
    return word


class Forbidden(Exception):
    """A pickle asks for something that could do more than hold data."""


class Dtype:
    """What stands in for `numpy.dtype`."""

    def __init__(self, word: bytes | str, *_: Any) -> None:
        self.word, self.order = as_text(word), "="

    def __setstate__(self, state: Any) -> None:
        order = as_text(state[1])
        self.order = order if order in "<>|=" else "="

    def dtype(self) -> Any:
        """The dtype, if its values are plain numbers."""
        import numpy as np

        if not _PLAIN.fullmatch(self.word):
            raise Forbidden(f"an array of {self.word[:20]!r}")
        return np.dtype(self.word).newbyteorder(self.order)  # ty: ignore[invalid-argument-type]


class Array:
    """What stands in for a `numpy.ndarray`."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> Any:
        """The array, from its shape, dtype, order and bytes."""
        import numpy as np

        _, shape, dtype, is_fortran, content = self.state
        if not isinstance(dtype, Dtype) or not isinstance(content, bytes):
            raise Forbidden("an array of objects")
        return np.frombuffer(content, dtype.dtype()).reshape(shape, order="F" if is_fortran else "C")


def array_type(*_: Any) -> NoReturn:
    """What stands in for `numpy.ndarray` itself, which is only named, never called."""
    raise Forbidden("numpy.ndarray()")


def encode(text: Any, encoding: Any) -> bytes:
    """What stands in for `_codecs.encode`, by which Python 3 writes bytes in old protocols."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise Forbidden("another encoding")
    return text.encode("latin1")


_KNOWN = {
    **{f"numpy{core}.multiarray._reconstruct": Array for core in (".core", "._core")},
    "numpy.ndarray": array_type,
    "numpy.dtype": Dtype,
    "_codecs.encode": encode,
}


class Unpickler(pickle.Unpickler):
    """An unpickler that knows nothing but what `_KNOWN` lists."""

    def find_class(self, module: str, name: str) -> Any:
        asked = f"{module}.{name}"
        if asked not in _KNOWN:
            raise Forbidden(asked)
        return _KNOWN[asked]
