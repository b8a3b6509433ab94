"""Left-right flips."""

import dataclasses
from typing import Literal

import numpy as np

from vitrail.core import rng
from vitrail.core.rng import Stream
from vitrail.data.augment import operations
from vitrail.data.augment.base import Augmentation
from vitrail.data.augment.operations import Images
from vitrail.data.preprocess import Preprocess


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flip(Augmentation):
    """Flip images left-right."""

    flip: Literal["none", "random", "alternate"] = "none"
    """Flip left-right at random, or each image in every other epoch (starting at random)."""

    @property
    def is_active(self) -> bool:
        return self.flip != "none"

    def apply(self, images: Images, stream: Stream, preprocess: Preprocess) -> Images:
        is_mirrored = self._draw_mirrored(stream)
        if not is_mirrored.any():
            return images
        images = images.copy()
        images[is_mirrored] = operations.flip(images[is_mirrored])
        return images

    def _draw_mirrored(self, stream: Stream) -> np.ndarray:
        """Return a mask (B) of the images to flip."""
        if self.flip == "random":
            return stream.uniform("flip") < 0.5
        first = rng.uniform(stream.seed, stream.index, stream="flip first") < 0.5
        return first ^ bool(stream.epoch % 2)
