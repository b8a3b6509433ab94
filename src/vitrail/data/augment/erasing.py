"""Random erasing (arXiv 1708.04896)."""

import dataclasses
import math
from typing import Annotated

import numpy as np

from vitrail.core.rng import Stream
from vitrail.core.settings import Bounds, Pair
from vitrail.data.augment import operations
from vitrail.data.augment.base import Augmentation
from vitrail.data.augment.operations import Images
from vitrail.data.preprocess import Preprocess

_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Erasing(Augmentation):
    """Erase a random box of an image."""

    erasing: Annotated[float, Bounds(0, 1)] = 0.0
    """Probability of erasing a random box with the mean colour (arXiv 1708.04896)."""

    @property
    def is_active(self) -> bool:
        return self.erasing > 0

    def apply(self, images: Images, stream: Stream, preprocess: Preprocess) -> Images:
        colour = np.rint(np.array(preprocess.mean) * 255)
        height, width = images.shape[1:3]
        return operations.erase(images, self._random_boxes((height, width), stream), colour)

    def _random_boxes(self, size: Pair, stream: Stream) -> np.ndarray:
        """Return the box (top, left, height, width) to erase from each image, int64 (B, 4).

        With the probability of the setting, it has 2 to 33 % of the area and an aspect ratio of 0.3 to 3.3; otherwise
        it is empty.
        """
        height, width = size
        area = height * width * (0.02 + 0.31 * stream.uniforms(_ATTEMPTS, "erase area"))
        narrow, broad = math.log(0.3), math.log(3.3)
        shape = np.exp(narrow + (broad - narrow) * stream.uniforms(_ATTEMPTS, "erase ratio"))
        tall, wide = np.rint(np.sqrt(area * shape)).astype(np.int64), np.rint(np.sqrt(area / shape)).astype(np.int64)
        fits = (tall < height) & (wide < width)
        first, rows = np.argmax(fits, axis=1), np.arange(len(stream.index))
        is_erased = fits[rows, first] & (stream.uniform("erase") < self.erasing)
        tall, wide = np.where(is_erased, tall[rows, first], 0), np.where(is_erased, wide[rows, first], 0)
        top, left = stream.integers(height - tall + 1, "erase top"), stream.integers(width - wide + 1, "erase left")
        return np.stack([top, left, tall, wide], axis=1)
