"""Cache of decoded images on disk, so that later epochs and runs decode no JPEG files.

The key of an entry is a hash of the file's bytes, of the settings of `Preprocess.read` and of Pillow's version. A
changed file or setting has another key, so a cached image always equals the decoded one.

Entries are only appended, under a lock, so threads and processes can share a cache. An incomplete or corrupt entry
fails its checksum; the image is then decoded and stored again. At the size limit, no more entries are added and none
is evicted: every epoch reads every image once, so eviction would remove each image just before its next use.
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

# key, offset, height, width, channels, CRC-32 of these fields and of the pixels
_ENTRY = struct.Struct("<16sQIIII")


class ImageCache:
    """Cache of decoded images in a folder, of at most `limit` bytes of pixels."""

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
        os.close(self._index)
        os.close(self._pixels)

    def read(self, path: str, preprocess: Preprocess) -> Image.Image | np.ndarray:
        """Return the uncropped image in the model's channels: an array from the cache, or the decoded image."""
        settings = _decoding_settings(preprocess)
        content = None
        try:
            file_version = (path, settings, *read_size_and_mtime(path))
        except (OSError, ValueError):
            file_version = (path, settings, -1, -1)
        key = self._keys.get(file_version)
        if key is None:
            content = read_file(path)
            key = hashlib.blake2b(settings.encode() + content, digest_size=16).digest()
        with self._lock:
            self._keys[file_version] = key
            pixels = self._load_pixels(key, preprocess.channels)
            self.hits, self.misses = self.hits + (pixels is not None), self.misses + (pixels is None)
        if pixels is not None:
            return pixels
        # Store exactly the bytes that were hashed: the file may have been replaced since the key was computed.
        if content is None:
            content = read_file(path)
            key = hashlib.blake2b(settings.encode() + content, digest_size=16).digest()
        image = preprocess.read(content, name=path)
        with self._lock, contextlib.suppress(OSError):  # disk full: the image is not cached
            self._store_pixels(key, np.ascontiguousarray(np.atleast_3d(np.asarray(image))))
        return image

    def _load_pixels(self, key: bytes, expected_channels: int) -> np.ndarray | None:
        """Return the image of a key, or None if it is missing, corrupt or has another number of channels."""
        if key not in self._entries:
            self._refresh_index()
        if key not in self._entries:
            return None
        offset, height, width, channels, checksum = self._entries[key]
        shape, size = (height, width, channels), height * width * channels
        try:
            content = os.pread(self._pixels, size, offset) if channels == expected_channels else b""
        except OSError:
            content = b""
        if len(content) != size or (
            key not in self._intact and _entry_checksum(key, offset, shape, content) != checksum
        ):
            del self._entries[key]
            return None
        self._intact.add(key)
        return np.frombuffer(content, np.uint8).reshape(shape)

    def _refresh_index(self) -> None:
        """Read the valid entries that other processes have appended."""
        with contextlib.suppress(OSError):
            while count := len(records := os.pread(self._index, 4096 * _ENTRY.size, self._indexed)) // _ENTRY.size:
                self._indexed += count * _ENTRY.size
                end = os.fstat(self._pixels).st_size  # after reading the entries: pixels are written before entries
                for key, *fields in _ENTRY.iter_unpack(records[: count * _ENTRY.size]):
                    offset, height, width, channels, checksum = fields
                    if 0 < height * width * channels <= end - offset and height * width <= MAX_PIXELS:
                        self._entries[key] = offset, height, width, channels, checksum
                        self._intact.discard(key)

    def _store_pixels(self, key: bytes, pixels: np.ndarray) -> None:
        """Append an image, unless the cache is full or another process has stored it."""
        fcntl.flock(self._index, fcntl.LOCK_EX)
        try:
            self._refresh_index()
            if self._load_pixels(key, pixels.shape[2]) is not None:
                return
            offset = os.fstat(self._pixels).st_size
            # If a crash left a partial entry at the end of the index, overwrite it.
            end = os.fstat(self._index).st_size // _ENTRY.size * _ENTRY.size
            if offset + pixels.nbytes > self.limit:
                return
            try:
                _write_at(self._pixels, pixels.tobytes(), offset)
                checksum = _entry_checksum(key, offset, pixels.shape, pixels.data)
                _write_at(self._index, _ENTRY.pack(key, offset, *pixels.shape, checksum), end)
            except OSError:
                os.ftruncate(self._pixels, offset)
                os.ftruncate(self._index, end)
                raise
            self._refresh_index()
        finally:
            fcntl.flock(self._index, fcntl.LOCK_UN)


def _entry_checksum(key: bytes, offset: int, shape: tuple[int, ...], pixels: bytes | memoryview) -> int:
    """Return the CRC-32 of the fields and the pixels of an entry."""
    return zlib.crc32(pixels, zlib.crc32(_ENTRY.pack(key, offset, *shape, 0)))


def _write_at(file: int, content: bytes, offset: int) -> None:
    """Write all bytes to a file descriptor at an offset."""
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _decoding_settings(preprocess: Preprocess) -> str:
    """Return the settings that `Preprocess.read` depends on, as JSON."""
    settings = preprocess.to_json()
    names = ("background", "jpeg") + (("resolution", "resize", "crop_fraction") if preprocess.jpeg == "double" else ())
    return json.dumps([PIL.__version__, preprocess.channels, *(settings[name] for name in names)])
