"""Augmentation operations on uint8 arrays (B, H, W, C), with a strength for each image.

Each operation equals torchvision's operation on a Pillow image bit for bit, for a single photo or a batch of small
images. Operations that treat all rows alike process the batch as one tall Pillow image.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from vitrail.core.errors import UsageError

Images = np.ndarray
GREY_OR_COLOUR = (1, 3)  # numbers of channels for which Pillow has modes


def flip(images: Images) -> Images:
    """Flip images left-right."""
    if images.shape[3] not in GREY_OR_COLOUR:
        return images[:, :, ::-1]
    return _map_rows(images, lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))


def to_grey(images: Images) -> Images:
    """Convert colour images to luminance in one channel (ITU-R 601-2, rounded as in Pillow)."""
    if images.shape[3] == 1:
        return images
    if images.shape[3] != 3:
        raise UsageError(f"Images must have 1 or 3 channels to become grey, got {images.shape[3]}.")
    return _map_rows(images, lambda image: image.convert("L"))


def blend(base: np.ndarray, images: Images, strength: np.ndarray) -> Images:
    """Interpolate from `base` (strength 0) to the image (strength 1), or extrapolate beyond it."""
    base = base.astype(np.float32)
    mixed = base + _per_image(strength) * (images.astype(np.float32) - base)
    return np.clip(mixed, 0, 255).astype(np.uint8)


def brightness(images: Images, strength: np.ndarray) -> Images:
    """Change the brightness: strength 0 gives black, 1 the image."""
    return blend(np.zeros(1, np.uint8), images, strength)


def contrast(images: Images, strength: np.ndarray) -> Images:
    """Change the contrast: strength 0 gives the mean grey level, 1 the image."""
    grey = to_grey(images)
    mean = grey.mean(axis=(1, 2, 3), keepdims=True, dtype=np.float64)
    return blend((mean + 0.5).astype(np.uint8), images, strength)


def saturation(images: Images, strength: np.ndarray) -> Images:
    """Change the saturation: strength 0 gives grey levels, 1 the image."""
    return blend(to_grey(images), images, strength)


def sharpness(images: Images, strength: np.ndarray) -> Images:
    """Change the sharpness: strength 0 gives the image smoothed by a 3 x 3 kernel, 1 the image.

    Border pixels are not changed.
    """
    smooth = images.copy()
    _, height, width, _ = images.shape
    if height > 2 and width > 2:
        levels = images.astype(np.float32)
        neighbourhood = sum(
            levels[:, down : height - 2 + down, right : width - 2 + right] for down in range(3) for right in range(3)
        )
        smooth[:, 1:-1, 1:-1] = np.floor((neighbourhood + 4 * levels[:, 1:-1, 1:-1]) / np.float32(13) + np.float32(0.5))
    return blend(smooth, images, strength)


def hue(images: Images, turn: np.ndarray) -> Images:
    """Rotate the hue by `turn`, from -1/2 to 1/2 of a circle; grey pixels have no hue."""
    if images.shape[3] != 3:
        return images
    turned = _map_rows(images, lambda image: image.convert("HSV"))
    turned[..., 0] += (turn * 255).astype(np.int64).astype(np.uint8)[:, None, None]
    return _map_rows(turned, lambda image: image.convert("RGB"), mode="HSV")


def posterise(images: Images, bits: np.ndarray) -> Images:
    """Keep only the `bits` highest bits of each level."""
    mask = ~((1 << (8 - np.round(bits).astype(np.int64))) - 1) & 255
    return images & _per_image(mask).astype(np.uint8)


def invert(images: Images) -> Images:
    """Invert all levels."""
    return 255 - images


def solarise(images: Images, threshold: np.ndarray) -> Images:
    """Invert the levels that are not below the threshold."""
    return np.where(images < _per_image(threshold), images, 255 - images)


def solarise_add(images: Images, addition: int) -> Images:
    """Add `addition` to the levels below 128 (Google's SolarizeAdd)."""
    added = np.minimum(images.astype(np.int64) + addition, 255).astype(np.uint8)
    return np.where(images < 128, added, images)


def autocontrast(images: Images) -> Images:
    """Stretch the levels of each channel so that the darkest becomes 0 and the brightest 255."""
    low = images.min(axis=(1, 2), keepdims=True).astype(np.float64)
    high = images.max(axis=(1, 2), keepdims=True).astype(np.float64)
    scale = 255.0 / np.where(high > low, high - low, 255)
    offset = -low * scale
    stretched = np.clip((images * scale + offset).astype(np.int64), 0, 255).astype(np.uint8)
    return np.where(high > low, stretched, images)


def equalise(images: Images) -> Images:
    """Equalise the histogram of each channel."""
    count, height, width, channels = images.shape
    levels = np.moveaxis(images, 3, 1).reshape(count * channels, height * width)
    offsets = np.arange(len(levels))[:, None] * 256
    histogram = np.bincount((levels + offsets).ravel(), minlength=len(levels) * 256).reshape(-1, 256)
    brightest = np.take_along_axis(histogram, 255 - np.argmax(histogram[:, ::-1] > 0, axis=1)[:, None], 1)
    step = (height * width - brightest) // 255
    below = np.cumsum(histogram, axis=1) - histogram
    spread = (step // 2 + below) // np.maximum(step, 1)
    table = np.where(step > 0, np.minimum(spread, 255), np.arange(256)).astype(np.uint8)
    equalised = np.take_along_axis(table, levels, 1).reshape(count, channels, height, width)
    return np.moveaxis(equalised, 1, 3)


def shear_x(images: Images, slope: np.ndarray, fill: int) -> Images:
    """Rows shift by `slope` for each pixel down."""
    return _affine(images, [(1.0, math.tan(math.atan(s)), 0.0, 0.0, 1.0, 0.0) for s in slope], fill)


def shear_y(images: Images, slope: np.ndarray, fill: int) -> Images:
    """Columns shift by `slope` for each pixel to the right."""
    return _affine(images, [(1.0, 0.0, 0.0, math.tan(math.atan(s)), 1.0, 0.0) for s in slope], fill)


def translate_x(images: Images, pixels: np.ndarray, fill: int) -> Images:
    """Move images to the right by the integer part of `pixels`."""
    return _affine(images, [(1.0, 0.0, -float(int(p)), 0.0, 1.0, 0.0) for p in pixels], fill)


def translate_y(images: Images, pixels: np.ndarray, fill: int) -> Images:
    """Move images down by the integer part of `pixels`."""
    return _affine(images, [(1.0, 0.0, 0.0, 0.0, 1.0, -float(int(p))) for p in pixels], fill)


def rotate(images: Images, degrees: np.ndarray, fill: int) -> Images:
    """Rotate images counter-clockwise about the centre. The size stays, so corners are cropped."""
    colour = _colour(fill, images.shape[3])
    return _map_images(images, degrees, lambda image, angle: image.rotate(float(angle), fillcolor=colour))


def pad_and_crop(images: Images, padding: int, down: np.ndarray, right: np.ndarray, fill: int) -> Images:
    """Pad images by `padding` pixels, then crop the window that starts at (down, right) of each."""
    count, height, width, _ = images.shape
    border = (padding, padding)
    padded = np.pad(images, ((0, 0), border, border, (0, 0)), constant_values=fill)
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
    box_heights = np.minimum(down + half_height, height) - top
    box_widths = np.minimum(right + half_width, width) - left
    return erase(images, np.stack([top, left, box_heights, box_widths], axis=1), np.array([fill] * channels))


def _affine(images: Images, matrices: list[tuple[float, ...]], fill: int) -> Images:
    """Transform images: each output pixel takes the input pixel at its transformed coordinates, or `fill`."""
    colour = _colour(fill, images.shape[3])
    return _map_images(
        images,
        matrices,
        lambda image, matrix: image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=colour),
    )


def _map_images(images: Images, settings: Any, change: Callable[[Image.Image, Any], Image.Image]) -> Images:
    """Apply `change(image, setting)` to each image with its setting."""
    changed = [np.asarray(change(to_image(pixels), setting)) for pixels, setting in zip(images, settings, strict=True)]
    return np.stack(changed).reshape(images.shape)


def _map_rows(images: Images, change: Callable[[Image.Image], Image.Image], mode: str | None = None) -> Images:
    """Apply an operation to all images at once, stacked into one tall image.

    The operation must change each row of pixels independently of its place and its neighbours.
    """
    count, height, width, channels = images.shape
    rows = np.ascontiguousarray(images).reshape(count * height, width, channels)
    image = Image.frombytes(mode or ("L" if channels == 1 else "RGB"), (width, count * height), rows.data)
    return np.array(change(image)).reshape(count, height, width, -1)


def to_image(image_HWC: np.ndarray) -> Image.Image:
    """Convert an array of 1 or 3 channels to a Pillow image."""
    return Image.fromarray(image_HWC[..., 0] if image_HWC.shape[2] == 1 else image_HWC)


def _colour(level: int, channels: int) -> int | tuple[int, ...]:
    """Return a grey level as Pillow's colour for images of this number of channels."""
    return level if channels == 1 else (level,) * channels


def _per_image(values: np.ndarray) -> np.ndarray:
    """Reshape values (B) so that they broadcast against images (B, H, W, C)."""
    values = np.asarray(values)
    return (values.astype(np.float32) if values.dtype.kind == "f" else values)[:, None, None, None]
