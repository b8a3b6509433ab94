"""Decode image files. Every failure raises CorruptFileError or UsageError with the file and the cause."""

import contextlib
import ctypes
import functools
import io
import logging
import os
import threading
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, first_line
from vitrail.core.settings import Pair

# Formats of cameras, scanners and the web (a JPEG with several frames is MPO). Pillow reads more formats, but most of
# its vulnerabilities were in those.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")

# Larger images are rejected before they are decoded: 120 megapixels take 360 MB of memory, and more during conversion.
MAX_PIXELS = 120_000_000

# Decoders also log the errors that they raise. Without a handler, Python would print them.
logging.getLogger("PIL").addHandler(logging.NullHandler())

# libtiff's own handlers print errors to stderr, so they are removed once for the process. Replacing the handlers or
# file descriptor 2 around each decode would race with other threads or swallow their output.
with contextlib.suppress(OSError, AttributeError):  # Pillow without libtiff, or libtiff's symbols are hidden
    _libtiff = ctypes.CDLL(Image.core.__file__)
    _libtiff.TIFFSetErrorHandler(None)
    _libtiff.TIFFSetWarningHandler(None)

# Transposition that turns an image upright, by its EXIF orientation.
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
_CONVERT_ADVICE = "convert it to JPEG and remove it, for example by `magick mogrify -format jpg *.heic`"
_EMPTY_CAUSE = "cannot be decoded (it is empty)"


class StoredImage(str):
    """Name of an image file in an archive, with the archive that reads it."""

    __slots__ = ("member", "store")

    def __new__(cls, name: str, store: "Store", member: str) -> Self:
        image = super().__new__(cls, name)
        image.store, image.member = store, member
        return image

    def __reduce__(self) -> tuple[type[Self], tuple[str, "Store", str]]:
        return type(self), (str(self), self.store, self.member)


class Store(Protocol):
    """An archive that holds images."""

    def read(self, path: str) -> bytes:
        """Return the bytes of a file. Raises CorruptFileError if they cannot be read."""
        ...

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        ...

    @property
    def time(self) -> int:
        """Modification time of the archive in nanoseconds."""
        ...


def read_size_and_mtime(path: str) -> tuple[int, int]:
    """Return the size of an image file in bytes and its modification time in nanoseconds.

    Raises OSError or ValueError if the file is missing.
    """
    if isinstance(path, StoredImage):
        return path.store.size(path.member), path.store.time
    status = os.stat(path)  # noqa: PTH116 - called for 200,000 files
    return status.st_size, status.st_mtime_ns


def read_file(path: str | Path) -> bytes:
    """Return the bytes of a regular file. Pipes, folders and empty files are rejected."""
    if not isinstance(path, StoredImage) and not os.path.isfile(path):  # noqa: PTH113 - raises for some invalid names
        raise UsageError(f"Image must be a file that exists, got {str(path)!r}.")
    try:
        content = path.store.read(path.member) if isinstance(path, StoredImage) else Path(path).read_bytes()
    except OSError as error:
        raise CorruptFileError(path=path, cause=f"cannot be read ({error.strerror})") from None
    if not content:
        raise CorruptFileError(path=path, cause=_EMPTY_CAUSE)
    return content


def open_image(
    source: str | Path | bytes, sufficient_size: Callable[[int, int], Pair] | None = None, *, name: str = "image"
) -> Image.Image:
    """Decode an image file and apply its EXIF orientation. Of an animation, decode the first frame.

    `source` is a path or the bytes of a file; errors call bytes `name`. `sufficient_size` maps width and height to a
    sufficient width and height: a JPEG is then decoded at the smallest scale that is at least that large. This is
    several times faster for camera photos and changes pixels slightly.
    """
    with _open_header(source, name) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS:,}")
        if image.format in ("JPEG", "MPO"):
            # The EXIF orientation is in the header and may exchange width and height.
            orientation, full_size = _read_orientation(image), image.size
            if sufficient_size is not None:
                size = sufficient_size(*(full_size[::-1] if orientation > 4 else full_size))
                image.draft(None, (size[1], size[0]) if orientation > 4 else size)
            try:
                image.load()
            except Exception:
                if image.size == full_size:
                    raise
                return open_image(source, name=name)  # lossless JPEG cannot be decoded at a smaller scale
        else:
            # Load first: reading the EXIF of a PNG decodes it, and a second load() would hide an error of the first.
            image.load()
            orientation = _read_orientation(image)  # 1 for TIFF, which Pillow has already turned
        if orientation == 1:
            return image
        upright = image.transpose(_TRANSPOSITIONS[orientation])
        upright.format = image.format
        return upright


def identify(source: str | Path | bytes, *, name: str = "image") -> tuple[str, str, Pair]:
    """Return the format, the mode and (width, height) from the header of an image."""
    with _open_header(source, name) as image:
        return str(image.format), image.mode, image.size


@contextlib.contextmanager
def _open_header(source: str | Path | bytes, name: str) -> Generator[Image.Image]:
    """Context with an opened image whose header has been read.

    Any error of the decoder within the block becomes a CorruptFileError that names the file.
    """
    if isinstance(source, StoredImage):
        name, source = str(source), read_file(source)
    if not isinstance(source, bytes):
        name = str(source)
        if not os.path.isfile(source):  # noqa: PTH113
            raise UsageError(f"Image must be a file that exists, got {name!r}.")
    try:
        # Given a path, Pillow maps some files into memory; their pixels would change or vanish with the file.
        with (
            _SUPPRESS_WARNINGS,
            io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file,
            Image.open(file, formats=_readable_formats()) as image,
        ):
            yield image
    except VitrailError:
        raise
    except UnidentifiedImageError:  # Pillow's text shows the address of a Python object
        if not (len(source) if isinstance(source, bytes) else Path(source).stat().st_size):
            raise CorruptFileError(path=name, cause=_EMPTY_CAUSE) from None
        if (cause := _explain_unsupported(source)) is not None:
            raise CorruptFileError(path=name, cause=f"{cause}: {_CONVERT_ADVICE}") from None
        *formats, last = _readable_formats()
        reason = f"its header is not that of a {', '.join(formats)} or {last} file"
        raise CorruptFileError(path=name, cause=f"cannot be decoded ({reason})") from None
    except Exception as error:  # decoders raise exceptions of any type
        raise CorruptFileError(path=name, cause=f"cannot be decoded ({first_line(error)})") from None


def _explain_unsupported(source: str | Path | bytes) -> str | None:
    """Return the cause if the file is a HEIC or AVIF image of a phone that this Pillow cannot decode."""
    with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file:
        head = file.read(12)
    if head[4:8] != b"ftyp":  # ISO base media file format: HEIF, AVIF, videos
        return None
    if head[8:12] in _HEIF_BRANDS:
        return "is a HEIC (HEIF) image, which cannot be decoded"
    return "is an AVIF image, which this Pillow cannot decode" if head[8:12] in (b"avif", b"avis") else None


class _WarningSuppressor:
    """Context manager that suppresses Pillow's warnings while any thread decodes images.

    The problems that they name raise errors or are repaired here.

    `warnings.catch_warnings` alone is not thread-safe: the last thread would restore the filters of another thread.
    """

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                self._filters.__exit__(None, None, None)


_SUPPRESS_WARNINGS = _WarningSuppressor()


def _read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if it is missing or corrupt."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # the parser raises exceptions of any type
        return 1
    return orientation if isinstance(orientation, int) and orientation in _TRANSPOSITIONS else 1


@functools.cache
def _readable_formats() -> tuple[str, ...]:
    """Return the formats in `FORMATS` that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def to_channels(image: Image.Image, channels: int, background: tuple[int, int, int]) -> Image.Image:
    """Convert to 8-bit grey (1 channel) or colour (3 channels); blend transparent pixels onto `background`."""
    mode = "L" if channels == 1 else "RGB"
    if image.mode in ("P", "PA") and image.palette is None:  # Pillow opens such a file, but a later assertion fails
        raise ValueError("it has no palette")
    if image.mode == mode and not image.has_transparency_data:
        return image
    if image.mode.startswith(("I", "F")):
        image = _to_8_bits(image)
    if image.mode == "La":  # premultiplied alpha; Pillow converts it to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        canvas = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(canvas, image)
    if channels == 1 and image.mode in ("CMYK", "LAB", "HSV", "YCbCr"):  # Pillow has no good direct conversion
        image = image.convert("RGB")
    return image.convert(mode)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale grey levels of 16 or 32 bits to 8 bits, where Pillow would clip them at 255.

    A file that states 16 bits (PNG, TIFF, PGM) is scaled from 16 bits. Other integers are taken as 16-bit if any level
    exceeds 255, otherwise as 8-bit. Floats are taken as shares in [0, 1] (levels up to 2 are clipped to 1), otherwise
    as integer levels.
    """
    levels = np.asarray(image, dtype=np.float64)
    if not np.isfinite(levels).all():
        raise ValueError("some levels are not finite numbers")
    largest = levels.max(initial=0)
    if image.mode.startswith("I;16") or image.format == "PPM":
        scale = 257.0
    elif image.mode == "F" and largest <= 2:
        scale = 1 / 255
    else:
        scale = 1.0 if largest <= 255 else 257.0 if largest <= 65_535 else largest / 255
    return Image.fromarray(np.clip(np.rint(levels / scale), 0, 255).astype(np.uint8))
