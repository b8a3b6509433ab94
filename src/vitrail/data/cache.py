"""Cache of decoded images on disk, so that later epochs and runs decode no JPEG files.

Pixels are keyed by the bytes of the image file, by what `Preprocess.read` depends on, and by the decoder's version: a
changed file or setting has another key, and a cached image equals the decoded one exactly. Entries are only appended,
under a lock, so that threads and processes may share a cache; an incomplete or damaged entry fails its checksum, and
the image is decoded and stored again. When the size limit is reached, entries are kept: every epoch reads every image
once, so replacing would remove each image just before its next use.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import Self

import numpy as np
import PIL
from PIL import Image

from vitrail.core.errors import UsageError
from vitrail.data.decode import MAX_PIXELS, read_file, read_size_and_mtime
from vitrail.data.preprocess import Preprocess

# key, offset, height, width, channels, checksum of all these and of the pixels
_ENTRY = struct.Struct("<16sQIIII")


class ImageCache:
    """`read(path, preprocess)` is a cached `preprocess.read(path)`."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        self.folder, self.limit = Path(folder), limit
        self.hits, self.misses = 0, 0
        self._lock = threading.Lock()
        self._entries: dict[bytes, tuple[int, int, int, int, int]] = {}
        self._intact: set[bytes] = set()
        self._keys: dict[tuple[str, str, int, int], bytes] = {}
        self._indexed = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._index, self._pixels = (os.open(self.folder / name, flags, 0o666) for name in ("index", "pixels"))
        except OSError as error:
            raise UsageError(
                f"Cache must be a folder that can be written, got {str(folder)!r} ({error.strerror})."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        os.close(self._index)
        os.close(self._pixels)

    def read(self, path: str, preprocess: Preprocess) -> Image.Image | np.ndarray:
        """The uncropped image in the model's channels: an array from the cache, otherwise decoded."""
        settings = _what_matters(preprocess)
        content = None
        try:
            memo = (path, settings, *read_size_and_mtime(path))
        except (OSError, ValueError):
            memo = (path, settings, -1, -1)
        key = self._keys.get(memo)
        if key is None:
            content = read_file(path)
            key = hashlib.blake2b(settings.encode() + content, digest_size=16).digest()
        with self._lock:
            self._keys[memo] = key
            pixels = self._load(key, preprocess.channels)
            self.hits, self.misses = self.hits + (pixels is not None), self.misses + (pixels is None)
        if pixels is not None:
            return pixels
        # What is stored is what was hashed: the file may have been replaced since.
        if content is None:
            content = read_file(path)
            key = hashlib.blake2b(settings.encode() + content, digest_size=16).digest()
        image = preprocess.read(content, name=path)
        with self._lock, contextlib.suppress(OSError):  # no room on the disk: the image is simply not kept
            self._store(key, np.ascontiguousarray(np.atleast_3d(np.asarray(image))))
        return image

    def _load(self, key: bytes, wanted: int) -> np.ndarray | None:
        """The image of a key, if it is there, intact and of as many channels as are wanted."""
        if key not in self._entries:
            self._refresh()
        if key not in self._entries:
            return None
        offset, height, width, channels, checksum = self._entries[key]
        shape, size = (height, width, channels), height * width * channels
        try:
            content = os.pread(self._pixels, size, offset) if channels == wanted else b""
        except OSError:
            content = b""
        if len(content) != size or (key not in self._intact and _checksum(key, offset, shape, content) != checksum):
            del self._entries[key]
            return None
        self._intact.add(key)
        return np.frombuffer(content, np.uint8).reshape(shape)

    def _refresh(self) -> None:
        """Read the entries that other processes have appended, except for invalid ones."""
        with contextlib.suppress(OSError):
            while count := len(records := os.pread(self._index, 4096 * _ENTRY.size, self._indexed)) // _ENTRY.size:
                self._indexed += count * _ENTRY.size
                end = os.fstat(self._pixels).st_size  # asked after the entries, which are written after the pixels
                for key, *place in _ENTRY.iter_unpack(records[: count * _ENTRY.size]):
                    offset, height, width, channels, checksum = place
                    if 0 < height * width * channels <= end - offset and height * width <= MAX_PIXELS:
                        self._entries[key] = offset, height, width, channels, checksum
                        self._intact.discard(key)

    def _store(self, key: bytes, pixels: np.ndarray) -> None:
        """Append an image, unless the cache is full or another process has stored it."""
        fcntl.flock(self._index, fcntl.LOCK_EX)
        try:
            self._refresh()
            if self._load(key, pixels.shape[2]) is not None:
                return
            offset = os.fstat(self._pixels).st_size
            # An index that a crash cut off in the middle of an entry goes back to the last complete one.
            end = os.fstat(self._index).st_size // _ENTRY.size * _ENTRY.size
            if offset + pixels.nbytes > self.limit:
                return
            try:
                _write(self._pixels, pixels.tobytes(), offset)
                checksum = _checksum(key, offset, pixels.shape, pixels.data)
                _write(self._index, _ENTRY.pack(key, offset, *pixels.shape, checksum), end)
            except OSError:
                os.ftruncate(self._pixels, offset)
                os.ftruncate(self._index, end)
                raise
            self._refresh()
        finally:
            fcntl.flock(self._index, fcntl.LOCK_UN)


def _checksum(key: bytes, offset: int, shape: tuple[int, ...], pixels: bytes | memoryview) -> int:
    return zlib.crc32(pixels, zlib.crc32(_ENTRY.pack(key, offset, *shape, 0)))


def _write(file: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _what_matters(preprocess: Preprocess) -> str:
    """The settings that `Preprocess.read` depends on."""
    settings = preprocess.to_json()
    names = ("background", "jpeg") + (("resolution", "resize", "crop_fraction") if preprocess.jpeg == "double" else ())
    return json.dumps([PIL.__version__, preprocess.channels, *(settings[name] for name in names)])
