"""Augmentation of training images, as a pure function of (seed, epoch, sample).

Random numbers are computed for a batch at once and do not depend on which images share the batch. `augment` then works
on decoded photos one by one or on many small images in memory: the same operations, so the same pixels. Mixing two
images comes last, on the normalised tensors.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.core import rng
from vitrail.core.errors import UsageError
from vitrail.core.rng import Stream
from vitrail.data.augment import operations
from vitrail.data.augment.config import Augment
from vitrail.data.augment.operations import GREY_OR_COLOUR, Images
from vitrail.data.augment.randaugment import TABLES, apply_random
from vitrail.data.preprocess import Preprocess

_CROP_ATTEMPTS = 10


class Jitter(NamedTuple):
    """A row of the table of colour jitter: a random strength from `neutral - extent` to `neutral + extent`."""

    name: str
    apply: Callable[[Images, np.ndarray], Images]
    extent: Callable[[Augment], float]
    neutral: float
    """The strength that changes nothing."""
    channels: tuple[int, ...] | None = None
    """Supported numbers of channels; None is any."""


JITTERS = (
    Jitter("brightness", operations.brightness, lambda settings: settings.brightness, 1),
    Jitter("contrast", operations.contrast, lambda settings: settings.contrast, 1, GREY_OR_COLOUR),
    Jitter("saturation", operations.saturation, lambda settings: settings.saturation, 1, GREY_OR_COLOUR),
    Jitter("hue", operations.hue, lambda settings: settings.hue, 0, GREY_OR_COLOUR),
)


def check_channels(settings: Augment, channels: int) -> None:
    """Refuse settings with an operation that does not support this number of channels."""
    table = TABLES[settings.operations] if settings.randaugment else ()
    rows = [("randaugment", row.name, row.channels) for row in table]
    rows += [(row.name, row.name, row.channels) for row in JITTERS if row.extent(settings)]
    for setting, name, fitting in rows:
        if fitting is not None and channels not in fitting:
            raise UsageError(
                f"Augmentation by {name} must have images of {' or '.join(map(str, fitting))} channels, got {channels}."
                f" Set augment.{setting} to 0."
            )


def augment(
    images: Sequence[Image.Image | np.ndarray] | np.ndarray, stream: Stream, settings: Augment, preprocess: Preprocess
) -> np.ndarray:
    """Augment decoded images (see `Preprocess.read`) or an array (B, H, W, C) of them. Returns uint8 (B, height, width,
    C)."""
    if settings.crop == "resized":
        pixels = _resized_crops(images, stream, settings, preprocess)
    elif isinstance(images, np.ndarray) and preprocess.keeps(*images.shape[1:]):
        pixels = images
    else:
        pixels = np.stack([preprocess.crop(image) for image in images])
    if settings.crop == "pad" and settings.padding:
        places = 2 * settings.padding + 1
        down, right = stream.integers(places, "pad down"), stream.integers(places, "pad right")
        pixels = operations.pad_and_crop(pixels, settings.padding, down, right, settings.fill)
    if settings.flip != "none":
        mirrored = _is_mirrored(stream, settings)
        if mirrored.any():
            pixels = pixels.copy()
            pixels[mirrored] = operations.flip(pixels[mirrored])
    for turn in range(settings.randaugment):
        pixels = apply_random(pixels, stream, turn, settings)
    pixels = _jitter(pixels, stream, settings)
    if settings.erasing:
        colour = np.rint(np.array(preprocess.mean) * 255)
        pixels = operations.erase(pixels, _erased_boxes(pixels.shape[1:3], stream, settings.erasing), colour)
    return np.ascontiguousarray(pixels)


def _is_mirrored(stream: Stream, settings: Augment) -> np.ndarray:
    if settings.flip == "random":
        return stream.uniform("flip") < 0.5
    first = rng.uniform(stream.seed, stream.index, stream="flip first") < 0.5
    return first ^ bool(stream.epoch % 2)


def _resized_crops(
    images: Sequence[Image.Image | np.ndarray] | np.ndarray, stream: Stream, settings: Augment, preprocess: Preprocess
) -> np.ndarray:
    sizes = [(one.height, one.width) if isinstance(one, Image.Image) else one.shape[:2] for one in images]
    boxes = crop_boxes(*np.array(sizes).T, stream, settings).tolist()
    return np.stack([preprocess.crop_box(one, tuple(box)) for one, box in zip(images, boxes, strict=True)])


def crop_boxes(heights: np.ndarray, widths: np.ndarray, stream: Stream, settings: Augment) -> np.ndarray:
    """A random box (top, left, height, width) in each image: the first of ten random areas and aspect ratios that fits.

    If none fits, the largest centred box with an allowed aspect ratio (torchvision's rule).
    """
    low, high = settings.scale
    areas = (heights * widths)[:, None] * (low + (high - low) * stream.uniforms(_CROP_ATTEMPTS, "crop area"))
    narrow, broad = map(math.log, settings.ratio)
    ratios = np.exp(narrow + (broad - narrow) * stream.uniforms(_CROP_ATTEMPTS, "crop ratio"))
    wide, tall = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (wide > 0) & (tall > 0) & (wide <= widths[:, None]) & (tall <= heights[:, None])
    first, rows = np.argmax(fits, axis=1), np.arange(len(heights))
    found = fits[rows, first]
    shape = widths / heights
    middle_wide = np.where(shape > settings.ratio[1], np.rint(heights * settings.ratio[1]), widths)
    middle_tall = np.where(shape < settings.ratio[0], np.rint(widths / settings.ratio[0]), heights)
    wide = np.where(found, wide[rows, first], np.maximum(middle_wide, 1)).astype(np.int64)
    tall = np.where(found, tall[rows, first], np.maximum(middle_tall, 1)).astype(np.int64)
    top = np.where(found, stream.integers(heights - tall + 1, "crop top"), (heights - tall) // 2)
    left = np.where(found, stream.integers(widths - wide + 1, "crop left"), (widths - wide) // 2)
    return np.stack([top, left, tall, wide], axis=1)


def _jitter(pixels: Images, stream: Stream, settings: Augment) -> Images:
    """Brightness, contrast, saturation and hue, in a random order for each image."""
    extents = [row.extent(settings) for row in JITTERS]
    if not any(extents):
        return pixels
    orders = np.argsort(np.stack([stream.uniform(f"{row.name} turn") for row in JITTERS], axis=1), axis=1)
    shifts = [extent * (2 * stream.uniform(row.name) - 1) for row, extent in zip(JITTERS, extents, strict=True)]
    pixels = pixels.copy()
    for turn in range(len(JITTERS)):
        for number, row in enumerate(JITTERS):
            chosen = orders[:, turn] == number
            if extents[number] and chosen.any():
                pixels[chosen] = row.apply(pixels[chosen], shifts[number][chosen] + row.neutral)
    return pixels


def _erased_boxes(size: tuple[int, int], stream: Stream, probability: float) -> np.ndarray:
    """With `probability`, a box of 2 to 33 % of the area with an aspect ratio of 0.3 to 3.3; otherwise an empty box."""
    height, width = size
    area = height * width * (0.02 + 0.31 * stream.uniforms(_CROP_ATTEMPTS, "erase area"))
    narrow, broad = math.log(0.3), math.log(3.3)
    shape = np.exp(narrow + (broad - narrow) * stream.uniforms(_CROP_ATTEMPTS, "erase ratio"))
    tall, wide = np.rint(np.sqrt(area * shape)).astype(np.int64), np.rint(np.sqrt(area / shape)).astype(np.int64)
    fits = (tall < height) & (wide < width)
    first, rows = np.argmax(fits, axis=1), np.arange(len(stream.index))
    wanted = fits[rows, first] & (stream.uniform("erase") < probability)
    tall, wide = np.where(wanted, tall[rows, first], 0), np.where(wanted, wide[rows, first], 0)
    return np.stack(
        [stream.integers(height - tall + 1, "erase top"), stream.integers(width - wide + 1, "erase left"), tall, wide],
        axis=1,
    )


class Mixture(NamedTuple):
    """How each image of a batch is mixed with its neighbour: 0 with 1, 2 with 3, ...; the last of an odd number is not
    mixed."""

    partner: np.ndarray
    """Index of the other image in the batch."""
    share: np.ndarray
    """Weight of the image's own label; 1 means not mixed."""
    boxes: np.ndarray
    """CutMix: the box (top, left, height, width) that the other image fills; empty for Mixup."""


def sample_mixture(
    stream: Stream, settings: Augment, size: tuple[int, int], alone: np.ndarray | None = None
) -> Mixture:
    """The mixture of a batch of samples in order. Neighbours in a shuffled order are random partners, and a rank's even
    part of the batch contains complete pairs, whatever the number of ranks. `alone` marks samples that must not be
    mixed."""
    count = len(stream.index)
    places = np.arange(count)
    partner = np.where(places ^ 1 < count, places ^ 1, places)
    is_cut = stream.uniform("cut or mix") < (0.5 if settings.mixup and settings.cutmix else float(settings.cutmix > 0))
    shares = [
        stream.beta(alpha, name) if alpha else np.ones(count)
        for name, alpha in (("mixup", settings.mixup), ("cutmix", settings.cutmix))
    ]
    height, width = size
    side = np.sqrt(1 - shares[1])
    tall, wide = np.rint(height * side), np.rint(width * side)
    middle_down, middle_right = stream.integers(height, "cut down"), stream.integers(width, "cut right")
    top, bottom = (np.clip(middle_down + half, 0, height) for half in (-(tall // 2), tall - tall // 2))
    left, right = (np.clip(middle_right + half, 0, width) for half in (-(wide // 2), wide - wide // 2))
    is_alone = partner == places
    if alone is not None:
        is_alone |= alone | alone[partner]
    is_cut &= ~is_alone
    boxes = np.stack([top, left, bottom - top, right - left], axis=1).astype(np.int64) * is_cut[:, None]
    share = np.where(is_cut, 1 - boxes[:, 2] * boxes[:, 3] / (height * width), shares[0])
    return Mixture(partner, np.where(is_alone, 1.0, share), boxes)


def mix(images_BCHW: Tensor, mixture: Mixture) -> Tensor:
    """Mix normalised images."""
    device = images_BCHW.device
    others = images_BCHW[torch.from_numpy(mixture.partner).to(device)]
    is_cut = mixture.boxes[:, 2] * mixture.boxes[:, 3] > 0
    share = torch.from_numpy(np.where(is_cut, 1.0, mixture.share)).to(device, images_BCHW.dtype)[:, None, None, None]
    mixed = images_BCHW * share + others * (1 - share)
    if not is_cut.any():
        return mixed
    top, left, tall, wide = torch.from_numpy(mixture.boxes).to(device).T[..., None, None, None]
    rows = torch.arange(images_BCHW.shape[2], device=device)[None, None, :, None]
    columns = torch.arange(images_BCHW.shape[3], device=device)[None, None, None, :]
    inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    return torch.where(inside, others, mixed)
