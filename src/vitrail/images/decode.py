"""From a file to a picture in memory. Any failure is one error that names the file and the cause."""

import functools
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from vitrail.errors import DamagedError, UsageError
from vitrail.settings import Pair

# What cameras, scanners and the web make (JPEG with several frames is MPO). Pillow reads more, and most of its security
# history lies in the rest.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF")

# Larger pictures are refused before they are decoded: 120 megapixels are 360 MB in memory, and more while converted.
MAX_PIXELS = 120_000_000

# Decoders log what they then raise. Without a handler, Python would print it.
logging.getLogger("PIL").addHandler(logging.NullHandler())

_ROTATED = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
_ORIENTATION = 0x0112


def open_picture(source: str | Path | bytes, enough: Callable[[int, int], Pair] | None = None) -> Image.Image:
    """The decoded picture in a file (or its bytes), upright as its EXIF orientation says, the first frame of many.

    `enough` says, for a width and height, which size would do: a JPEG is then decoded at the smallest scale that is not
    smaller, which is several times faster for camera photos and changes pixels slightly.
    """
    name = "picture" if isinstance(source, bytes) else str(source)
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise UsageError(f"Picture must be a file that exists, got {name!r}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # decoders warn of what we refuse or repair
            file = io.BytesIO(source) if isinstance(source, bytes) else source
            with Image.open(file, formats=_known_formats()) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels are more than {MAX_PIXELS:,}")
                if image.format == "TIFF" and image.info.get("compression") == "webp":
                    # Builds of libtiff without it complain on the terminal, past Python.
                    raise ValueError("TIFF compressed by WebP is not supported")
                if enough is not None:
                    _decode_smaller(image, enough)
                image.load()
                ImageOps.exif_transpose(image, in_place=True)
                return image
    except Exception as error:  # decoders raise whatever their format's parser raises
        raise DamagedError(f"{name!r} cannot be decoded ({_first_line(error)}).") from None


def identify(source: str | Path) -> tuple[str, str, Pair]:
    """What the header of a picture file says: format, mode and (width, height)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(source, formats=_known_formats()) as image:
                return str(image.format), image.mode, image.size
    except Exception as error:
        raise DamagedError(f"{str(source)!r} cannot be decoded ({_first_line(error)}).") from None


def _first_line(error: Exception) -> str:
    """Why a decoder failed, in a few words."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@functools.cache
def _known_formats() -> tuple[str, ...]:
    """The formats that this build of Pillow can read."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _decode_smaller(image: Image.Image, enough: Callable[[int, int], Pair]) -> None:
    if image.getexif().get(_ORIENTATION) in _ROTATED:
        height, width = enough(image.height, image.width)
    else:
        width, height = enough(image.width, image.height)
    image.draft(None, (width, height))


def to_channels(image: Image.Image, channels: int, background: tuple[int, int, int]) -> Image.Image:
    """The picture in 8-bit grey (1 channel) or colour (3), with what is transparent laid on `background`."""
    mode = "L" if channels == 1 else "RGB"
    if image.mode == mode and not image.has_transparency_data:
        return image
    if image.mode.startswith(("I", "F")):
        image = _to_8_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (*background, 255))
        image = Image.alpha_composite(ground, image)
    if channels == 1 and image.mode in ("CMYK", "LAB", "HSV", "YCbCr"):  # no good direct way to grey
        image = image.convert("RGB")
    return image.convert(mode)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Grey levels of 16 or 32 bits, scaled to 8 instead of cut off at 255.

    Integers fill 16 bits if any needs them, else they are 8-bit already; real numbers are shares of white up to 1,
    else levels up to 255.
    """
    levels = np.asarray(image, dtype=np.float64)
    if not np.isfinite(levels).all():
        raise ValueError("some levels are not finite numbers")
    largest = levels.max(initial=0)
    if image.mode.startswith("I;16"):
        scale = 257.0
    elif image.mode == "F" and largest <= 1:
        scale = 1 / 255
    else:
        scale = 1.0 if largest <= 255 else 257.0 if largest <= 65_535 else largest / 255
    return Image.fromarray(np.clip(np.rint(levels / scale), 0, 255).astype(np.uint8))
