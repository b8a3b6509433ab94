"""Changes to pictures in memory: uint8 arrays (B, H, W, C) with a strength for each picture.

Each equals torchvision's operation of that name on a Pillow image, to the bit (its own rounding included), and works
on one photo as on a batch of small pictures. Where all rows change alike, the batch is one tall Pillow image.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from vitrail.errors import UsageError

Pictures = np.ndarray


def flip(pictures: Pictures) -> Pictures:
    """Left becomes right."""
    if pictures.shape[3] not in (1, 3):
        return pictures[:, :, ::-1]
    return _tall(pictures, lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def to_grey(pictures: Pictures) -> Pictures:
    """Luminance, one channel (ITU-R 601-2, as Pillow rounds it). Only colours have one."""
    if pictures.shape[3] == 1:
        return pictures
    if pictures.shape[3] != 3:
        raise UsageError(f"Pictures must have 1 or 3 channels to become grey, got {pictures.shape[3]}.")
    return _tall(pictures, lambda image: image.convert("L"))


def blend(ground: np.ndarray, pictures: Pictures, strength: np.ndarray) -> Pictures:
    """From `ground` (0) to the picture (1) and beyond."""
    ground = ground.astype(np.float32)
    mixed = ground + _each(strength) * (pictures.astype(np.float32) - ground)
    return np.clip(mixed, 0, 255).astype(np.uint8)


def brightness(pictures: Pictures, strength: np.ndarray) -> Pictures:
    """0 is black, 1 the picture."""
    return blend(np.zeros(1, np.uint8), pictures, strength)


def contrast(pictures: Pictures, strength: np.ndarray) -> Pictures:
    """0 is the mean grey, 1 the picture."""
    grey = to_grey(pictures)
    mean = grey.mean(axis=(1, 2, 3), keepdims=True, dtype=np.float64)
    return blend((mean + 0.5).astype(np.uint8), pictures, strength)


def saturation(pictures: Pictures, strength: np.ndarray) -> Pictures:
    """0 is grey, 1 the picture."""
    return blend(to_grey(pictures), pictures, strength)


def sharpness(pictures: Pictures, strength: np.ndarray) -> Pictures:
    """0 is smoothed by a 3 x 3 kernel, 1 the picture. The rim has no neighbours and stays."""
    smooth = pictures.copy()
    _, height, width, _ = pictures.shape
    if height > 2 and width > 2:
        wide = pictures.astype(np.float32)
        around = sum(
            wide[:, down : height - 2 + down, right : width - 2 + right] for down in range(3) for right in range(3)
        )
        smooth[:, 1:-1, 1:-1] = np.floor((around + 4 * wide[:, 1:-1, 1:-1]) / np.float32(13) + np.float32(0.5))
    return blend(smooth, pictures, strength)


def hue(pictures: Pictures, turn: np.ndarray) -> Pictures:
    """Colours turned round the circle by a share from -1/2 to 1/2; grey has none."""
    if pictures.shape[3] != 3:
        return pictures
    turned = _tall(pictures, lambda image: image.convert("HSV"))
    turned[..., 0] += (turn * 255).astype(np.int64).astype(np.uint8)[:, None, None]
    return _tall(turned, lambda image: image.convert("RGB"), mode="HSV")


def posterise(pictures: Pictures, kept_bits: np.ndarray) -> Pictures:
    """Only the highest bits of each level."""
    mask = ~((1 << (8 - np.round(kept_bits).astype(np.int64))) - 1) & 255
    return pictures & _each(mask).astype(np.uint8)


def solarise(pictures: Pictures, threshold: np.ndarray) -> Pictures:
    """Levels from the threshold on become their opposite."""
    return np.where(pictures < _each(threshold), pictures, 255 - pictures)


def brighten_dark(pictures: Pictures, addition: int) -> Pictures:
    """Levels of the darker half grow (Google's SolarizeAdd)."""
    added = np.minimum(pictures.astype(np.int64) + addition, 255).astype(np.uint8)
    return np.where(pictures < 128, added, pictures)


def autocontrast(pictures: Pictures) -> Pictures:
    """The darkest level of each channel becomes black, the brightest white."""
    low = pictures.min(axis=(1, 2), keepdims=True).astype(np.float64)
    high = pictures.max(axis=(1, 2), keepdims=True).astype(np.float64)
    scale = 255.0 / np.where(high > low, high - low, 255)
    offset = -low * scale
    stretched = np.clip((pictures * scale + offset).astype(np.int64), 0, 255).astype(np.uint8)
    return np.where(high > low, stretched, pictures)


def equalise(pictures: Pictures) -> Pictures:
    """Levels spread so that each is about equally frequent."""
    count, height, width, channels = pictures.shape
    levels = np.moveaxis(pictures, 3, 1).reshape(count * channels, height * width)
    offsets = np.arange(len(levels))[:, None] * 256
    histogram = np.bincount((levels + offsets).ravel(), minlength=len(levels) * 256).reshape(-1, 256)
    brightest = np.take_along_axis(histogram, 255 - np.argmax(histogram[:, ::-1] > 0, axis=1)[:, None], 1)
    step = (height * width - brightest) // 255
    below = np.cumsum(histogram, axis=1) - histogram
    spread = (step // 2 + below) // np.maximum(step, 1)
    table = np.where(step > 0, np.minimum(spread, 255), np.arange(256)).astype(np.uint8)
    equal = np.take_along_axis(table, levels, 1).reshape(count, channels, height, width)
    return np.moveaxis(equal, 1, 3)


def shear_x(pictures: Pictures, slope: np.ndarray, fill: int) -> Pictures:
    """Rows shift by `slope` for each pixel down."""
    return _affine(pictures, [(1.0, math.tan(math.atan(s)), 0.0, 0.0, 1.0, 0.0) for s in slope], fill)


def shear_y(pictures: Pictures, slope: np.ndarray, fill: int) -> Pictures:
    """Columns shift by `slope` for each pixel to the right."""
    return _affine(pictures, [(1.0, 0.0, 0.0, math.tan(math.atan(s)), 1.0, 0.0) for s in slope], fill)


def translate_x(pictures: Pictures, pixels: np.ndarray, fill: int) -> Pictures:
    """The picture moves to the right by whole pixels."""
    return _affine(pictures, [(1.0, 0.0, -float(int(p)), 0.0, 1.0, 0.0) for p in pixels], fill)


def translate_y(pictures: Pictures, pixels: np.ndarray, fill: int) -> Pictures:
    """The picture moves down by whole pixels."""
    return _affine(pictures, [(1.0, 0.0, 0.0, 0.0, 1.0, -float(int(p))) for p in pixels], fill)


def rotate(pictures: Pictures, degrees: np.ndarray, fill: int) -> Pictures:
    """Counter-clockwise about the centre; corners are cut off."""
    colour = _colour(fill, pictures.shape[3])
    return _one_by_one(pictures, degrees, lambda image, angle: image.rotate(float(angle), fillcolor=colour))


def pad_and_crop(pictures: Pictures, padding: int, down: np.ndarray, right: np.ndarray, fill: int) -> Pictures:
    """A rim of `padding` pixels, then the window that starts `down` and `right` pixels in."""
    count, height, width, _ = pictures.shape
    rim = (padding, padding)
    padded = np.pad(pictures, ((0, 0), rim, rim, (0, 0)), constant_values=fill)
    rows = down[:, None, None] + np.arange(height)[None, :, None]
    columns = right[:, None, None] + np.arange(width)[None, None, :]
    return padded[np.arange(count)[:, None, None], rows, columns]


def erase(pictures: Pictures, boxes: np.ndarray, colour: np.ndarray) -> Pictures:
    """A box (top, left, height, width) of each picture painted over."""
    top, left, high, wide = (side[:, None, None] for side in boxes.T)
    rows, columns = np.arange(pictures.shape[1])[None, :, None], np.arange(pictures.shape[2])[None, None, :]
    inside = (rows >= top) & (rows < top + high) & (columns >= left) & (columns < left + wide)
    return np.where(inside[..., None], colour.astype(np.uint8), pictures)


def _affine(pictures: Pictures, matrices: list[tuple[float, ...]], fill: int) -> Pictures:
    """Each output pixel takes the input pixel that its matrix (by rows) leads to, or the fill."""
    colour = _colour(fill, pictures.shape[3])
    return _one_by_one(
        pictures,
        matrices,
        lambda image, matrix: image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=colour),
    )


def _one_by_one(pictures: Pictures, settings: Any, change: Callable[[Image.Image, Any], Image.Image]) -> Pictures:
    changed = [np.asarray(change(to_image(one), setting)) for one, setting in zip(pictures, settings, strict=True)]
    return np.stack(changed).reshape(pictures.shape)


def _tall(pictures: Pictures, change: Callable[[Image.Image], Image.Image], mode: str | None = None) -> Pictures:
    """Apply what treats every row alike to all pictures at once, stacked to one tall image."""
    count, height, width, channels = pictures.shape
    rows = np.ascontiguousarray(pictures).reshape(count * height, width, channels)
    image = Image.frombytes(mode or ("L" if channels == 1 else "RGB"), (width, count * height), rows.data)
    return np.array(change(image)).reshape(count, height, width, -1)


def to_image(picture_HWC: np.ndarray) -> Image.Image:
    """A picture of 1 or 3 channels for Pillow."""
    return Image.fromarray(picture_HWC[..., 0] if picture_HWC.shape[2] == 1 else picture_HWC)


def _colour(level: int, channels: int) -> int | tuple[int, ...]:
    return level if channels == 1 else (level,) * channels


def _each(values: np.ndarray) -> np.ndarray:
    """One value for each picture, against (B, H, W, C)."""
    values = np.asarray(values)
    return (values.astype(np.float32) if values.dtype.kind == "f" else values)[:, None, None, None]
