"""Colour jitter: random brightness, contrast, saturation and hue."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np

from vitrail.core.rng import Stream
from vitrail.core.settings import Bounds
from vitrail.data.augment import operations
from vitrail.data.augment.base import Augmentation, require_channels
from vitrail.data.augment.operations import GREY_OR_COLOUR, Images
from vitrail.data.preprocess import Preprocess


class Jitter(NamedTuple):
    """One operation of colour jitter.

    Its random strength is from `neutral - extent` to `neutral + extent`, where the extent is the setting of this name.
    """

    name: str
    apply: Callable[[Images, np.ndarray], Images]
    neutral: float
    """The strength that changes nothing."""
    channels: tuple[int, ...] | None = None
    """Supported numbers of channels; None for any number."""


JITTERS = (
    Jitter("brightness", operations.brightness, 1),
    Jitter("contrast", operations.contrast, 1, GREY_OR_COLOUR),
    Jitter("saturation", operations.saturation, 1, GREY_OR_COLOUR),
    Jitter("hue", operations.hue, 0, GREY_OR_COLOUR),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColourJitter(Augmentation):
    """Brightness, contrast, saturation and hue, in a random order for each image."""

    brightness: Annotated[float, Bounds(0, 1)] = 0.0
    """Colour jitter: factors from 1 - x to 1 + x."""
    contrast: Annotated[float, Bounds(0, 1)] = 0.0
    """Colour jitter: factors from 1 - x to 1 + x."""
    saturation: Annotated[float, Bounds(0, 1)] = 0.0
    """Colour jitter: factors from 1 - x to 1 + x."""
    hue: Annotated[float, Bounds(0, 0.5)] = 0.0
    """Colour jitter: rotation of the hue from -x to x, where 0.5 is half a circle."""

    @property
    def is_active(self) -> bool:
        return any(self._extents())

    def check_channels(self, channels: int) -> None:
        for row, extent in zip(JITTERS, self._extents(), strict=True):
            if extent:
                require_channels(row.name, row.name, row.channels, channels)

    def apply(self, images: Images, stream: Stream, preprocess: Preprocess) -> Images:
        extents = self._extents()
        orders = np.argsort(np.stack([stream.uniform(f"{row.name} turn") for row in JITTERS], axis=1), axis=1)
        shifts = [extent * (2 * stream.uniform(row.name) - 1) for row, extent in zip(JITTERS, extents, strict=True)]
        images = images.copy()
        for turn in range(len(JITTERS)):
            for number, row in enumerate(JITTERS):
                is_selected = orders[:, turn] == number
                if extents[number] and is_selected.any():
                    images[is_selected] = row.apply(images[is_selected], shifts[number][is_selected] + row.neutral)
        return images

    def _extents(self) -> list[float]:
        return [getattr(self, row.name) for row in JITTERS]
