"""An augmentation: fog, a random share of white over the whole image."""

import dataclasses
from typing import Annotated

import numpy as np

from vitrail.core.rng import Stream
from vitrail.core.settings import Bounds
from vitrail.data.augment.base import Augmentation
from vitrail.data.preprocess import Preprocess


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fog(Augmentation):
    """Blend images with white."""

    fog: Annotated[float, Bounds(0, 1)] = 0.0
    """Largest share of white."""
    fog_level: Annotated[int, Bounds(0, 255)] = 255
    """Grey level of the fog."""

    @property
    def is_active(self) -> bool:
        return self.fog > 0

    def apply(self, images: np.ndarray, stream: Stream, preprocess: Preprocess) -> np.ndarray:
        share_B111 = self.fog * stream.uniform("fog")[:, None, None, None]
        return np.rint((1 - share_B111) * images + share_B111 * self.fog_level).astype(np.uint8)
