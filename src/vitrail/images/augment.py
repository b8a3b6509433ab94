"""Augmentation: what training does to a picture, as a pure function of (seed, epoch, index of the sample).

All chance is drawn for a batch at once and does not depend on which pictures share the batch. `augment` then works on
decoded photos one by one or on many small pictures in memory: the same operations, so the same pixels. Mixing two
pictures comes last, on the numbers that the model reads.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail import chance
from vitrail.configs.augment import Augment
from vitrail.images import operations
from vitrail.images.preprocess import Preprocess

_CROP_ATTEMPTS = 10
_JITTERS = ("brightness", "contrast", "saturation", "hue")


class Draw(NamedTuple):
    """Where chance is drawn for some samples: everything random about them follows from these numbers."""

    seed: int
    epoch: int
    index: np.ndarray

    def uniform(self, draw: str) -> np.ndarray:
        return chance.uniform(self.seed, self.epoch, self.index, draw=draw)

    def whole(self, high: int | np.ndarray, draw: str) -> np.ndarray:
        return chance.whole(high, self.seed, self.epoch, self.index, draw=draw)


def augment(
    pictures: Sequence[Image.Image | np.ndarray] | np.ndarray, draw: Draw, settings: Augment, preprocess: Preprocess
) -> np.ndarray:
    """Decoded pictures (see `Preprocess.read`), or an array (B, H, W, C) of them, as uint8 (B, height, width, C)."""
    if settings.crop == "resized":
        pixels = _resized_crops(pictures, draw, settings, preprocess)
    elif isinstance(pictures, np.ndarray) and preprocess.keeps(*pictures.shape[1:]):
        pixels = pictures
    else:
        pixels = np.stack([preprocess.crop(picture) for picture in pictures])
    if settings.crop == "pad" and settings.padding:
        places = 2 * settings.padding + 1
        down, right = draw.whole(places, "pad down"), draw.whole(places, "pad right")
        pixels = operations.pad_and_crop(pixels, settings.padding, down, right, settings.fill)
    if settings.flip != "none":
        mirrored = _is_mirrored(draw, settings)
        if mirrored.any():
            pixels = pixels.copy()
            pixels[mirrored] = operations.flip(pixels[mirrored])
    for turn in range(settings.randaugment):
        pixels = _random_operation(pixels, draw, turn, settings)
    pixels = _jitter(pixels, draw, settings)
    if settings.erasing:
        colour = np.rint(np.array(preprocess.mean) * 255)
        pixels = operations.erase(pixels, _erased_boxes(pixels.shape[1:3], draw, settings.erasing), colour)
    return np.ascontiguousarray(pixels)


def _is_mirrored(draw: Draw, settings: Augment) -> np.ndarray:
    if settings.flip == "random":
        return draw.uniform("flip") < 0.5
    first = chance.uniform(draw.seed, draw.index, draw="flip first") < 0.5
    return first ^ bool(draw.epoch % 2)


def _resized_crops(
    pictures: Sequence[Image.Image | np.ndarray] | np.ndarray, draw: Draw, settings: Augment, preprocess: Preprocess
) -> np.ndarray:
    sizes = [(one.height, one.width) if isinstance(one, Image.Image) else one.shape[:2] for one in pictures]
    boxes = crop_boxes(*np.array(sizes).T, draw, settings).tolist()
    return np.stack([preprocess.crop_box(one, tuple(box)) for one, box in zip(pictures, boxes, strict=True)])


def crop_boxes(heights: np.ndarray, widths: np.ndarray, draw: Draw, settings: Augment) -> np.ndarray:
    """A random box (top, left, height, width) in each picture: the first of ten drawn areas and shapes that fits.

    If none fits, the largest box in the middle whose shape is allowed (torchvision's rule).
    """
    attempts = np.arange(_CROP_ATTEMPTS)
    index = draw.index[:, None]
    low, high = settings.scale
    areas = (heights * widths)[:, None] * (
        low + (high - low) * chance.uniform(draw.seed, draw.epoch, index, attempts, draw="crop area")
    )
    narrow, broad = map(math.log, settings.ratio)
    ratios = np.exp(
        narrow + (broad - narrow) * chance.uniform(draw.seed, draw.epoch, index, attempts, draw="crop ratio")
    )
    wide, tall = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (wide > 0) & (tall > 0) & (wide <= widths[:, None]) & (tall <= heights[:, None])
    first, rows = np.argmax(fits, axis=1), np.arange(len(heights))
    found = fits[rows, first]
    shape = widths / heights
    middle_wide = np.where(shape > settings.ratio[1], np.rint(heights * settings.ratio[1]), widths)
    middle_tall = np.where(shape < settings.ratio[0], np.rint(widths / settings.ratio[0]), heights)
    wide = np.where(found, wide[rows, first], np.maximum(middle_wide, 1)).astype(np.int64)
    tall = np.where(found, tall[rows, first], np.maximum(middle_tall, 1)).astype(np.int64)
    top = np.where(found, draw.whole(heights - tall + 1, "crop top"), (heights - tall) // 2)
    left = np.where(found, draw.whole(widths - wide + 1, "crop left"), (widths - wide) // 2)
    return np.stack([top, left, tall, wide], axis=1)


def _random_operation(pixels: np.ndarray, draw: Draw, turn: int, settings: Augment) -> np.ndarray:
    """One of RandAugment's operations for each picture."""
    count, apply = (16, _googles_operation) if settings.operations == "google" else (14, _torchvisions_operation)
    kind = draw.whole(count, f"operation {turn}")
    sign = np.where(draw.uniform(f"sign {turn}") < 0.5, -1.0, 1.0)
    pixels = pixels.copy()
    for number in np.unique(kind):
        chosen = kind == number
        some = Draw(draw.seed, draw.epoch, draw.index[chosen])
        pixels[chosen] = apply(int(number), pixels[chosen], sign[chosen], settings, some)
    return pixels


def _torchvisions_operation(
    number: int, some: np.ndarray, signs: np.ndarray, settings: Augment, _draw: Draw
) -> np.ndarray:
    """Strengths on torchvision's scale of 31 numbers in single precision; the first operation is to do nothing."""
    height, width = some.shape[1:3]
    fill, none = settings.fill, np.zeros(len(some))

    def level(end: float) -> float:
        return float(torch.linspace(0.0, end, 31)[settings.magnitude])

    match number:
        case 1:
            return operations.shear_x(some, level(0.3) * signs, fill)
        case 2:
            return operations.shear_y(some, level(0.3) * signs, fill)
        case 3:
            return operations.translate_x(some, level(150 / 331 * width) * signs, fill)
        case 4:
            return operations.translate_y(some, level(150 / 331 * height) * signs, fill)
        case 5:
            return operations.rotate(some, level(30.0) * signs, fill)
        case 6:
            return operations.brightness(some, 1 + level(0.9) * signs)
        case 7:
            return operations.saturation(some, 1 + level(0.9) * signs)
        case 8:
            return operations.contrast(some, 1 + level(0.9) * signs)
        case 9:
            return operations.sharpness(some, 1 + level(0.9) * signs)
        case 10:
            return operations.posterise(some, none + 8 - round(settings.magnitude / 7.5))
        case 11:
            return operations.solarise(some, none + float(torch.linspace(255.0, 0.0, 31)[settings.magnitude]))
        case 12:
            return operations.autocontrast(some)
        case 13:
            return operations.equalise(some)
    return some


def _googles_operation(number: int, some: np.ndarray, signs: np.ndarray, settings: Augment, draw: Draw) -> np.ndarray:
    """Strengths of big_vision's randaug, whose lengths are for pictures of 224 pixels and follow the size here."""
    share, fill, none = settings.magnitude / 10, settings.fill, np.zeros(len(some))
    height, width = some.shape[1:3]
    factor = none + 1.8 * share + 0.1
    match number:
        case 0:
            return operations.autocontrast(some)
        case 1:
            return operations.equalise(some)
        case 2:
            return 255 - some
        case 3:
            return operations.rotate(some, 30 * share * signs, fill)
        case 4:
            return operations.posterise(some, none + min(int(4 * share), 8))
        case 5:
            return operations.solarise(some, none + int(256 * share))
        case 6:
            return operations.saturation(some, factor)
        case 7:
            return operations.contrast(some, factor)
        case 8:
            return operations.brightness(some, factor)
        case 9:
            return operations.sharpness(some, factor)
        case 10:
            return operations.shear_x(some, 0.3 * share * signs, fill)
        case 11:
            return operations.shear_y(some, 0.3 * share * signs, fill)
        case 12:
            return operations.translate_x(some, 100 * share * signs * width / 224, fill)
        case 13:
            return operations.translate_y(some, 100 * share * signs * height / 224, fill)
        case 14:
            half = [int(40 * share * side / 224) for side in (height, width)]
            middle = [draw.whole(height, "cut out down"), draw.whole(width, "cut out right")]
            top, left = (np.maximum(place - reach, 0) for place, reach in zip(middle, half, strict=True))
            tall, wide = (
                np.minimum(place + reach, side) - start
                for place, reach, side, start in zip(middle, half, (height, width), (top, left), strict=True)
            )
            return operations.erase(some, np.stack([top, left, tall, wide], axis=1), np.array([fill] * some.shape[3]))
    return operations.brighten_dark(some, int(110 * share))


def _jitter(pixels: np.ndarray, draw: Draw, settings: Augment) -> np.ndarray:
    """Brightness, contrast, saturation and hue, in an order of its own for each picture."""
    ranges = [getattr(settings, name) for name in _JITTERS]
    if not any(ranges):
        return pixels
    orders = np.argsort(np.stack([draw.uniform(f"{name} turn") for name in _JITTERS], axis=1), axis=1)
    shifts = [extent * (2 * draw.uniform(name) - 1) for name, extent in zip(_JITTERS, ranges, strict=True)]
    pixels = pixels.copy()
    for turn in range(len(_JITTERS)):
        for number, (name, extent) in enumerate(zip(_JITTERS, ranges, strict=True)):
            chosen = orders[:, turn] == number
            if extent and chosen.any():
                strength = shifts[number][chosen] + (name != "hue")
                pixels[chosen] = getattr(operations, name)(pixels[chosen], strength)
    return pixels


def _erased_boxes(size: tuple[int, int], draw: Draw, probability: float) -> np.ndarray:
    """With the probability, a box of 2 to 33 % of the area and of width over height 0.3 to 3.3; else an empty one."""
    height, width = size
    counters = (draw.seed, draw.epoch, draw.index[:, None], np.arange(_CROP_ATTEMPTS))
    area = height * width * (0.02 + 0.31 * chance.uniform(*counters, draw="erase area"))
    shape = np.exp(math.log(0.3) + (math.log(3.3) - math.log(0.3)) * chance.uniform(*counters, draw="erase ratio"))
    tall, wide = np.rint(np.sqrt(area * shape)).astype(np.int64), np.rint(np.sqrt(area / shape)).astype(np.int64)
    fits = (tall < height) & (wide < width)
    first, rows = np.argmax(fits, axis=1), np.arange(len(draw.index))
    wanted = fits[rows, first] & (draw.uniform("erase") < probability)
    tall, wide = np.where(wanted, tall[rows, first], 0), np.where(wanted, wide[rows, first], 0)
    return np.stack(
        [draw.whole(height - tall + 1, "erase top"), draw.whole(width - wide + 1, "erase left"), tall, wide], axis=1
    )


class Mixture(NamedTuple):
    """How each picture of a batch is mixed with its neighbour: 0 with 1, 2 with 3, ...; an odd one out stays alone."""

    partner: np.ndarray
    """Position of the other picture in the batch."""
    share: np.ndarray
    """How much of the label stays its own: 1 is all."""
    boxes: np.ndarray
    """CutMix: the box (top, left, height, width) that the other picture fills; empty for Mixup."""


def draw_mixture(draw: Draw, settings: Augment, size: tuple[int, int], alone: np.ndarray | None = None) -> Mixture:
    """The mixture of a batch of samples in order. Neighbours in a shuffled order are random partners, and an even
    share of the batch holds whole pairs, whatever the number of ranks. `alone` marks samples that must not be mixed."""
    count = len(draw.index)
    places = np.arange(count)
    partner = np.where(places ^ 1 < count, places ^ 1, places)
    counters = (draw.seed, draw.epoch, draw.index)
    is_cut = draw.uniform("cut or mix") < (0.5 if settings.mixup and settings.cutmix else float(settings.cutmix > 0))
    shares = [
        chance.beta(alpha, *counters, draw=name) if alpha else np.ones(count)
        for name, alpha in (("mixup", settings.mixup), ("cutmix", settings.cutmix))
    ]
    height, width = size
    side = np.sqrt(1 - shares[1])
    tall, wide = np.rint(height * side), np.rint(width * side)
    middle_down, middle_right = draw.whole(height, "cut down"), draw.whole(width, "cut right")
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
    """Normalised pictures, mixed."""
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
