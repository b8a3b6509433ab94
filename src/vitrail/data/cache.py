"""Decoded pictures on disk, so that a second epoch, and a second run, need no JPEG work.

Pixels are keyed by the bytes of the picture file and by what `Preprocess.read` depends on: a changed file or setting is
another key, and a cached picture is exactly the one that would be decoded. Entries are only appended, under a lock,
so that threads and processes may share a cache; a torn or damaged entry fails its checksum and is decoded anew. When
the size limit is reached, what is there stays: every epoch reads every picture once, and replacing would lose each
picture just before its next use.
"""

import contextlib
import fcntl
import hashlib
import json
import struct
import threading
import zlib
from pathlib import Path
from typing import Self

import numpy as np
from PIL import Image

from vitrail.errors import UsageError
from vitrail.images.preprocess import Preprocess

# key, offset, height, width, channels, checksum of the pixels
_ENTRY = struct.Struct("<16sQIIII")


class PictureCache:
    """`read(path, preprocess)` is `preprocess.read(path)`, remembered."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        self.folder, self.limit = Path(folder), limit
        self.hits, self.misses = 0, 0
        self._lock = threading.Lock()
        self._entries: dict[bytes, tuple[int, ...]] = {}
        self._intact: set[bytes] = set()
        self._keys: dict[tuple[str, str], bytes] = {}
        self._indexed = 0
        self._mapped: np.ndarray = np.zeros(0, np.uint8)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._index = (self.folder / "index").open("a+b")
            self._pixels = (self.folder / "pixels").open("a+b")
        except OSError as error:
            raise UsageError(
                f"Cache must be a folder that can be written, got {str(folder)!r} ({error.strerror})."
            ) from None

    def read(self, path: str, preprocess: Preprocess) -> Image.Image | np.ndarray:
        """The whole picture in the model's channels: from the cache as an array, else decoded."""
        settings = _what_matters(preprocess)
        key = self._keys.get((path, settings)) or _key(path, settings)
        if key is None:
            return preprocess.read(path)  # which says what is wrong with the file
        with self._lock:
            self._keys[path, settings] = key
            pixels = self._load(key)
            self.hits, self.misses = self.hits + (pixels is not None), self.misses + (pixels is None)
        if pixels is not None:
            return pixels
        picture = preprocess.read(path)
        with self._lock, contextlib.suppress(OSError):  # no room on the disk: the picture is simply not kept
            self._store(key, np.ascontiguousarray(np.atleast_3d(np.asarray(picture))))
        return picture

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the files."""
        self._index.close()
        self._pixels.close()

    def _load(self, key: bytes) -> np.ndarray | None:
        if key not in self._entries:
            self._refresh()
        if key not in self._entries:
            return None
        offset, height, width, channels, checksum = self._entries[key]
        end = offset + height * width * channels
        if end > len(self._mapped) and self._pixels.seek(0, 2) >= end:
            self._mapped = np.memmap(self._pixels, np.uint8, "r")
        pixels = self._mapped[offset:end]
        if key not in self._intact:
            if len(pixels) != end - offset or zlib.crc32(pixels.data) != checksum:
                return None
            self._intact.add(key)
        return pixels.reshape(height, width, channels)

    def _refresh(self) -> None:
        """Learn of entries that others have appended."""
        self._index.seek(self._indexed)
        while len(record := self._index.read(_ENTRY.size)) == _ENTRY.size:
            key, *place = _ENTRY.unpack(record)
            self._entries[key] = tuple(place)
            self._indexed += _ENTRY.size

    def _store(self, key: bytes, pixels: np.ndarray) -> None:
        """Append a picture, unless the cache is full."""
        fcntl.flock(self._index, fcntl.LOCK_EX)
        try:
            offset = self._pixels.seek(0, 2)
            if offset + pixels.nbytes > self.limit:
                return
            self._pixels.write(pixels.data)
            self._pixels.flush()
            # An index that a crash cut off in the middle of an entry is filled up, so that entries stay aligned.
            self._index.write(b"\0" * (-self._index.seek(0, 2) % _ENTRY.size))
            self._index.write(_ENTRY.pack(key, offset, *pixels.shape, zlib.crc32(pixels.data)))
            self._index.flush()
        finally:
            fcntl.flock(self._index, fcntl.LOCK_UN)


def _what_matters(preprocess: Preprocess) -> str:
    """The settings that change what `Preprocess.read` returns."""
    settings = preprocess.to_json()
    names = ("background", "jpeg") + (("resolution", "resize", "crop_fraction") if preprocess.jpeg == "double" else ())
    return json.dumps([preprocess.channels, *(settings[name] for name in names)])


def _key(path: str, settings: str) -> bytes | None:
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    try:
        digest.update(Path(path).read_bytes())
    except OSError:
        return None
    return digest.digest()
