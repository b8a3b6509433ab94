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
    """One of RandAugment's fourteen operations for each picture (the first is to do nothing)."""
    height, width = pixels.shape[1:3]
    fill = settings.fill

    def level(end: float) -> float:
        """The strength on torchvision's scale of 31 numbers in single precision, and on beyond its end."""
        if settings.magnitude > 30:
            return end * settings.magnitude / 30
        return float(torch.linspace(0.0, end, 31)[settings.magnitude])

    kind = draw.whole(14, f"operation {turn}")
    sign = np.where(draw.uniform(f"sign {turn}") < 0.5, -1.0, 1.0)
    pixels = pixels.copy()
    for number in np.unique(kind):
        chosen = kind == number
        some, signs, none = pixels[chosen], sign[chosen], np.zeros(int(chosen.sum()))
        match number:
            case 1:
                some = operations.shear_x(some, level(0.3) * signs, fill)
            case 2:
                some = operations.shear_y(some, level(0.3) * signs, fill)
            case 3:
                some = operations.translate_x(some, level(150 / 331 * width) * signs, fill)
            case 4:
                some = operations.translate_y(some, level(150 / 331 * height) * signs, fill)
            case 5:
                some = operations.rotate(some, level(30.0) * signs, fill)
            case 6:
                some = operations.brightness(some, np.maximum(1 + level(0.9) * signs, 0))
            case 7:
                some = operations.saturation(some, np.maximum(1 + level(0.9) * signs, 0))
            case 8:
                some = operations.contrast(some, np.maximum(1 + level(0.9) * signs, 0))
            case 9:
                some = operations.sharpness(some, np.maximum(1 + level(0.9) * signs, 0))
            case 10:
                some = operations.posterise(some, none + max(8 - round(settings.magnitude / 7.5), 0))
            case 11:
                some = operations.solarise(
                    some, none + float(torch.linspace(255.0, 0.0, 31)[min(settings.magnitude, 30)])
                )
            case 12:
                some = operations.autocontrast(some)
            case 13:
                some = operations.equalise(some)
        pixels[chosen] = some
    return pixels


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
