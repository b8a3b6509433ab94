"""Decoding image files. Any failure is one error that names the file and the cause."""

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
from vitrail.data.image_files import is_file

# What cameras, scanners and the web make (JPEG with several frames is MPO). Pillow reads more, and most of its security
# history lies in the rest.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")

# Larger images are refused before they are decoded: 120 megapixels are 360 MB in memory, and more while converted.
MAX_PIXELS = 120_000_000

# Decoders log what they then raise. Without a handler, Python would print it.
logging.getLogger("PIL").addHandler(logging.NullHandler())

# libtiff prints it, past Python, unless it has no handler. That is set once for the process: to exchange handlers, or
# file descriptor 2, around each decode would race with other threads' decoding, or swallow what they print.
with contextlib.suppress(OSError, AttributeError):  # a Pillow without libtiff, or with one that cannot be reached
    _libtiff = ctypes.CDLL(Image.core.__file__)
    _libtiff.TIFFSetErrorHandler(None)
    _libtiff.TIFFSetWarningHandler(None)

# What turns an image upright, by its EXIF orientation.
_TURNS = {
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
_CONVERT = "convert it to JPEG and remove it, for example by `magick mogrify -format jpg *.heic`"
_EMPTY = "cannot be decoded (it is empty)"


class StoredImage(str):
    """An image file in an archive: its name in messages, and what reads it."""

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
        """The bytes of a file; CorruptFileError if they cannot be read."""
        ...

    def size(self, path: str) -> int:
        """Its size."""
        ...

    @property
    def time(self) -> int:
        """When the archive was changed, in nanoseconds."""
        ...


def read_size_and_mtime(path: str) -> tuple[int, int]:
    """The size of an image file and when it was changed, in nanoseconds; OSError or ValueError if it is missing."""
    if isinstance(path, StoredImage):
        return path.store.size(path.member), path.store.time
    now = os.stat(path)  # noqa: PTH116 - 200,000 of them
    return now.st_size, now.st_mtime_ns


def read_file(path: str | Path) -> bytes:
    """The bytes of a regular file; pipes and folders are refused."""
    if not isinstance(path, StoredImage) and not is_file(path):
        raise UsageError(f"Image must be a file that exists, got {str(path)!r}.")
    try:
        content = path.store.read(path.member) if isinstance(path, StoredImage) else Path(path).read_bytes()
    except OSError as error:
        raise CorruptFileError(path=path, cause=f"cannot be read ({error.strerror})") from None
    if not content:
        raise CorruptFileError(path=path, cause=_EMPTY)
    return content


def open_image(
    source: str | Path | bytes, enough: Callable[[int, int], Pair] | None = None, *, name: str = "image"
) -> Image.Image:
    """Decode an image file (or its bytes, which errors call `name`), with its EXIF orientation applied; of an
    animation, the first frame.

    `enough` maps width and height to a sufficient size: a JPEG is then decoded at the smallest scale that is not
    smaller, which is several times faster for camera photos and changes pixels slightly.
    """
    with _opened(source, name) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS:,}")
        if image.format in ("JPEG", "MPO"):
            # Its EXIF is in the header, and tells width from height.
            orientation, full_size = _orientation(image), image.size
            if enough is not None:
                size = enough(*(full_size[::-1] if orientation > 4 else full_size))
                image.draft(None, (size[1], size[0]) if orientation > 4 else size)
            try:
                image.load()
            except Exception:
                if image.size == full_size:
                    raise
                return open_image(source, name=name)  # lossless JPEG has no smaller scale
        else:
            # Load first: to be asked for EXIF decodes a PNG, and a second load() would hide that the first one failed.
            image.load()
            orientation = _orientation(image)  # 1 for TIFF, which Pillow has turned
        if orientation == 1:
            return image
        turned = image.transpose(_TURNS[orientation])
        turned.format = image.format
        return turned


def identify(source: str | Path | bytes, *, name: str = "image") -> tuple[str, str, Pair]:
    """Format, mode and (width, height) from the header of an image."""
    with _opened(source, name) as image:
        return str(image.format), image.mode, image.size


@contextlib.contextmanager
def _opened(source: str | Path | bytes, name: str) -> Generator[Image.Image]:
    """Open an image and read its header. Any error of the decoder within the block becomes one error that names the
    file."""
    if isinstance(source, StoredImage):
        name, source = str(source), read_file(source)
    if not isinstance(source, bytes):
        name = str(source)
        if not is_file(source):
            raise UsageError(f"Image must be a file that exists, got {name!r}.")
    try:
        # By its path, Pillow would map some files into memory: their pixels would change, or be gone, with the file.
        with (
            _QUIET,
            io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file,
            Image.open(file, formats=_known_formats()) as image,
        ):
            yield image
    except VitrailError:
        raise
    except UnidentifiedImageError:  # its text names objects in memory
        if not (len(source) if isinstance(source, bytes) else Path(source).stat().st_size):
            raise CorruptFileError(path=name, cause=_EMPTY) from None
        if (cause := _unsupported(source)) is not None:
            raise CorruptFileError(path=name, cause=f"{cause}: {_CONVERT}") from None
        *some, last = _known_formats()
        reason = f"its header is not that of a {', '.join(some)} or {last} file"
        raise CorruptFileError(path=name, cause=f"cannot be decoded ({reason})") from None
    except Exception as error:  # decoders raise whatever their format's parser raises
        raise CorruptFileError(path=name, cause=f"cannot be decoded ({first_line(error)})") from None


def _unsupported(source: str | Path | bytes) -> str | None:
    """The cause, if the file is in a format that phones write and that cannot be decoded here."""
    with io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb") as file:
        head = file.read(12)
    if head[4:8] != b"ftyp":  # ISO base media file format: HEIF, AVIF, films
        return None
    if head[8:12] in _HEIF_BRANDS:
        return "is a HEIC (HEIF) image, which cannot be decoded"
    return "is an AVIF image, which this Pillow cannot decode" if head[8:12] in (b"avif", b"avis") else None


class _Quiet:
    """While any thread decodes, suppress Pillow's warnings about what we refuse or repair.

    `warnings.catch_warnings` alone is not thread-safe: the last thread would restore another thread's filters.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = warnings.catch_warnings()
                self._before.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.__exit__(None, None, None)


_QUIET = _Quiet()


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 if it is missing or damaged."""
    try:
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a parser's whatever
        return 1
    return found if isinstance(found, int) and found in _TURNS else 1


@functools.cache
def _known_formats() -> tuple[str, ...]:
    """The formats that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def to_channels(image: Image.Image, channels: int, background: tuple[int, int, int]) -> Image.Image:
    """The image in 8-bit grey (1 channel) or colour (3), with transparent pixels blended onto `background`."""
    mode = "L" if channels == 1 else "RGB"
    if image.mode in ("P", "PA") and image.palette is None:  # Pillow opens such a file, and fails by an assertion later
        raise ValueError("it has no palette")
    if image.mode == mode and not image.has_transparency_data:
        return image
    if image.mode.startswith(("I", "F")):
        image = _to_8_bits(image)
    if image.mode == "La":  # premultiplied; Pillow has no other way out of it
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(ground, image)
    if channels == 1 and image.mode in ("CMYK", "LAB", "HSV", "YCbCr"):  # no good direct way to grey
        image = image.convert("RGB")
    return image.convert(mode)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Grey levels of 16 or 32 bits, scaled to 8 bits instead of clipped at 255.

    If the file states 16 bits (PNG, TIFF, PGM), that is the scale. Other integers are 16-bit if any value exceeds 255,
    otherwise 8-bit. Floats are in [0, 1] (values slightly above 1 are clipped), otherwise levels.
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
