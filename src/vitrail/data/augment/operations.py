"""Augmentation operations on uint8 arrays (B, H, W, C), with a strength for each image.

Each equals torchvision's operation on a Pillow image bit for bit, and works on one photo or on a batch of small images.
Operations that treat all rows alike process the batch as one tall Pillow image.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from vitrail.core.errors import UsageError

Images = np.ndarray
GREY_OR_COLOUR = (1, 3)  # numbers of channels that Pillow has modes for


def flip(images: Images) -> Images:
    """Flip left-right."""
    if images.shape[3] not in GREY_OR_COLOUR:
        return images[:, :, ::-1]
    return _tall(images, lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def to_grey(images: Images) -> Images:
    """Luminance in one channel (ITU-R 601-2, rounded as in Pillow), for colour images only."""
    if images.shape[3] == 1:
        return images
    if images.shape[3] != 3:
        raise UsageError(f"Images must have 1 or 3 channels to become grey, got {images.shape[3]}.")
    return _tall(images, lambda image: image.convert("L"))


def blend(ground: np.ndarray, images: Images, strength: np.ndarray) -> Images:
    """Interpolate from `ground` (strength 0) to the image (1) and beyond."""
    ground = ground.astype(np.float32)
    mixed = ground + _each(strength) * (images.astype(np.float32) - ground)
    return np.clip(mixed, 0, 255).astype(np.uint8)


def brightness(images: Images, strength: np.ndarray) -> Images:
    """0 is black, 1 the image."""
    return blend(np.zeros(1, np.uint8), images, strength)


def contrast(images: Images, strength: np.ndarray) -> Images:
    """0 is the mean grey, 1 the image."""
    grey = to_grey(images)
    mean = grey.mean(axis=(1, 2, 3), keepdims=True, dtype=np.float64)
    return blend((mean + 0.5).astype(np.uint8), images, strength)


def saturation(images: Images, strength: np.ndarray) -> Images:
    """0 is grey, 1 the image."""
    return blend(to_grey(images), images, strength)


def sharpness(images: Images, strength: np.ndarray) -> Images:
    """0 is smoothed by a 3 x 3 kernel, 1 the image. Border pixels are not changed."""
    smooth = images.copy()
    _, height, width, _ = images.shape
    if height > 2 and width > 2:
        wide = images.astype(np.float32)
        around = sum(
            wide[:, down : height - 2 + down, right : width - 2 + right] for down in range(3) for right in range(3)
        )
        smooth[:, 1:-1, 1:-1] = np.floor((around + 4 * wide[:, 1:-1, 1:-1]) / np.float32(13) + np.float32(0.5))
    return blend(smooth, images, strength)


def hue(images: Images, turn: np.ndarray) -> Images:
    """Rotate the hue by `turn`, from -1/2 to 1/2 of a circle; grey pixels have no hue."""
    if images.shape[3] != 3:
        return images
    turned = _tall(images, lambda image: image.convert("HSV"))
    turned[..., 0] += (turn * 255).astype(np.int64).astype(np.uint8)[:, None, None]
    return _tall(turned, lambda image: image.convert("RGB"), mode="HSV")


def posterise(images: Images, kept_bits: np.ndarray) -> Images:
    """Keep only the highest bits of each level."""
    mask = ~((1 << (8 - np.round(kept_bits).astype(np.int64))) - 1) & 255
    return images & _each(mask).astype(np.uint8)


def invert(images: Images) -> Images:
    """Invert all levels."""
    return 255 - images


def solarise(images: Images, threshold: np.ndarray) -> Images:
    """Invert levels from the threshold on."""
    return np.where(images < _each(threshold), images, 255 - images)


def solarise_add(images: Images, addition: int) -> Images:
    """Add to the levels of the darker half (Google's SolarizeAdd)."""
    added = np.minimum(images.astype(np.int64) + addition, 255).astype(np.uint8)
    return np.where(images < 128, added, images)


def autocontrast(images: Images) -> Images:
    """The darkest level of each channel becomes black, the brightest white."""
    low = images.min(axis=(1, 2), keepdims=True).astype(np.float64)
    high = images.max(axis=(1, 2), keepdims=True).astype(np.float64)
    scale = 255.0 / np.where(high > low, high - low, 255)
    offset = -low * scale
    stretched = np.clip((images * scale + offset).astype(np.int64), 0, 255).astype(np.uint8)
    return np.where(high > low, stretched, images)


def equalise(images: Images) -> Images:
    """Histogram equalisation."""
    count, height, width, channels = images.shape
    levels = np.moveaxis(images, 3, 1).reshape(count * channels, height * width)
    offsets = np.arange(len(levels))[:, None] * 256
    histogram = np.bincount((levels + offsets).ravel(), minlength=len(levels) * 256).reshape(-1, 256)
    brightest = np.take_along_axis(histogram, 255 - np.argmax(histogram[:, ::-1] > 0, axis=1)[:, None], 1)
    step = (height * width - brightest) // 255
    below = np.cumsum(histogram, axis=1) - histogram
    spread = (step // 2 + below) // np.maximum(step, 1)
    table = np.where(step > 0, np.minimum(spread, 255), np.arange(256)).astype(np.uint8)
    equal = np.take_along_axis(table, levels, 1).reshape(count, channels, height, width)
    return np.moveaxis(equal, 1, 3)


def shear_x(images: Images, slope: np.ndarray, fill: int) -> Images:
    """Rows shift by `slope` for each pixel down."""
    return _affine(images, [(1.0, math.tan(math.atan(s)), 0.0, 0.0, 1.0, 0.0) for s in slope], fill)


def shear_y(images: Images, slope: np.ndarray, fill: int) -> Images:
    """Columns shift by `slope` for each pixel to the right."""
    return _affine(images, [(1.0, 0.0, 0.0, math.tan(math.atan(s)), 1.0, 0.0) for s in slope], fill)


def translate_x(images: Images, pixels: np.ndarray, fill: int) -> Images:
    """The image moves to the right by the integer part of `pixels`."""
    return _affine(images, [(1.0, 0.0, -float(int(p)), 0.0, 1.0, 0.0) for p in pixels], fill)


def translate_y(images: Images, pixels: np.ndarray, fill: int) -> Images:
    """The image moves down by the integer part of `pixels`."""
    return _affine(images, [(1.0, 0.0, 0.0, 0.0, 1.0, -float(int(p))) for p in pixels], fill)


def rotate(images: Images, degrees: np.ndarray, fill: int) -> Images:
    """Rotate counter-clockwise about the centre; corners are cropped."""
    colour = _colour(fill, images.shape[3])
    return _one_by_one(images, degrees, lambda image, angle: image.rotate(float(angle), fillcolor=colour))


def pad_and_crop(images: Images, padding: int, down: np.ndarray, right: np.ndarray, fill: int) -> Images:
    """Pad by `padding` pixels, then crop the window that starts at (down, right)."""
    count, height, width, _ = images.shape
    rim = (padding, padding)
    padded = np.pad(images, ((0, 0), rim, rim, (0, 0)), constant_values=fill)
    rows = down[:, None, None] + np.arange(height)[None, :, None]
    columns = right[:, None, None] + np.arange(width)[None, None, :]
    return padded[np.arange(count)[:, None, None], rows, columns]


def erase(images: Images, boxes: np.ndarray, colour: np.ndarray) -> Images:
    """Fill a box (top, left, height, width) of each image with `colour`."""
    top, left, high, wide = (side[:, None, None] for side in boxes.T)
    rows, columns = np.arange(images.shape[1])[None, :, None], np.arange(images.shape[2])[None, None, :]
    inside = (rows >= top) & (rows < top + high) & (columns >= left) & (columns < left + wide)
    return np.where(inside[..., None], colour.astype(np.uint8), images)


def cut_out(
    images: Images, down: np.ndarray, right: np.ndarray, half_height: int, half_width: int, fill: int
) -> Images:
    """Fill a box around the point (down, right) of each image; parts outside of the image are ignored."""
    height, width, channels = images.shape[1:]
    top, left = np.maximum(down - half_height, 0), np.maximum(right - half_width, 0)
    tall, wide = np.minimum(down + half_height, height) - top, np.minimum(right + half_width, width) - left
    return erase(images, np.stack([top, left, tall, wide], axis=1), np.array([fill] * channels))


def _affine(images: Images, matrices: list[tuple[float, ...]], fill: int) -> Images:
    """Affine transformation: each output pixel takes the input pixel at its transformed coordinates, or the fill."""
    colour = _colour(fill, images.shape[3])
    return _one_by_one(
        images,
        matrices,
        lambda image, matrix: image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=colour),
    )


def _one_by_one(images: Images, settings: Any, change: Callable[[Image.Image, Any], Image.Image]) -> Images:
    changed = [np.asarray(change(to_image(one), setting)) for one, setting in zip(images, settings, strict=True)]
    return np.stack(changed).reshape(images.shape)


def _tall(images: Images, change: Callable[[Image.Image], Image.Image], mode: str | None = None) -> Images:
    """Apply an operation that treats every row alike to all images at once, stacked into one tall image."""
    count, height, width, channels = images.shape
    rows = np.ascontiguousarray(images).reshape(count * height, width, channels)
    image = Image.frombytes(mode or ("L" if channels == 1 else "RGB"), (width, count * height), rows.data)
    return np.array(change(image)).reshape(count, height, width, -1)


def to_image(image_HWC: np.ndarray) -> Image.Image:
    """A Pillow image of 1 or 3 channels."""
    return Image.fromarray(image_HWC[..., 0] if image_HWC.shape[2] == 1 else image_HWC)


def _colour(level: int, channels: int) -> int | tuple[int, ...]:
    return level if channels == 1 else (level,) * channels


def _each(values: np.ndarray) -> np.ndarray:
    """One value for each image, shaped to broadcast against (B, H, W, C)."""
    values = np.asarray(values)
    return (values.astype(np.float32) if values.dtype.kind == "f" else values)[:, None, None, None]
