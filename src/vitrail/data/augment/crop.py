"""Random crops: of the padded image, or of a box with random area and aspect ratio."""

import dataclasses
import math
from typing import Annotated, Literal

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.core.rng import Stream
from vitrail.core.settings import Bounds, sentence_case
from vitrail.data.augment import operations
from vitrail.data.augment.base import FillingAugmentation
from vitrail.data.augment.operations import Images
from vitrail.data.preprocess import Preprocess

_ATTEMPTS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crop(FillingAugmentation):
    """Random crop of the padded image, or RandomResizedCrop."""

    crop: Literal["none", "pad", "resized"] = "none"
    """none: as in evaluation. pad: pad the image, then crop a random window. resized: RandomResizedCrop."""
    padding: Annotated[int, Bounds(0, 1024)] = 4
    """Padding of crop = pad, in pixels."""
    scale: Annotated[tuple[float, float], Bounds(0, 1)] = (0.08, 1.0)
    """Smallest and largest share of the area that crop = resized keeps."""
    ratio: Annotated[tuple[float, float], Bounds(0, 100)] = (3 / 4, 4 / 3)
    """Smallest and largest width over height of crop = resized."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise UsageError(f"{sentence_case(name)} must be two rising numbers above 0, got {[low, high]}.")

    @property
    def is_active(self) -> bool:
        return self.crop != "none"

    def boxes(self, heights: np.ndarray, widths: np.ndarray, stream: Stream) -> np.ndarray | None:
        """Return the boxes of RandomResizedCrop for crop = resized, otherwise None.

        A box has the first of ten random areas and aspect ratios that fits into the image. If none fits, it is the
        largest centred box with an allowed aspect ratio, as in torchvision.
        """
        if self.crop != "resized":
            return None
        low, high = self.scale
        areas = (heights * widths)[:, None] * (low + (high - low) * stream.uniforms(_ATTEMPTS, "crop area"))
        narrow, broad = map(math.log, self.ratio)
        ratios = np.exp(narrow + (broad - narrow) * stream.uniforms(_ATTEMPTS, "crop ratio"))
        wide, tall = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
        fits = (wide > 0) & (tall > 0) & (wide <= widths[:, None]) & (tall <= heights[:, None])
        first, rows = np.argmax(fits, axis=1), np.arange(len(heights))
        has_box = fits[rows, first]
        shape = widths / heights
        middle_wide = np.where(shape > self.ratio[1], np.rint(heights * self.ratio[1]), widths)
        middle_tall = np.where(shape < self.ratio[0], np.rint(widths / self.ratio[0]), heights)
        wide = np.where(has_box, wide[rows, first], np.maximum(middle_wide, 1)).astype(np.int64)
        tall = np.where(has_box, tall[rows, first], np.maximum(middle_tall, 1)).astype(np.int64)
        top = np.where(has_box, stream.integers(heights - tall + 1, "crop top"), (heights - tall) // 2)
        left = np.where(has_box, stream.integers(widths - wide + 1, "crop left"), (widths - wide) // 2)
        return np.stack([top, left, tall, wide], axis=1)

    def apply(self, images: Images, stream: Stream, preprocess: Preprocess) -> Images:
        if self.crop != "pad" or not self.padding:
            return images
        positions = 2 * self.padding + 1
        down, right = stream.integers(positions, "pad down"), stream.integers(positions, "pad right")
        return operations.pad_and_crop(images, self.padding, down, right, self.fill)
