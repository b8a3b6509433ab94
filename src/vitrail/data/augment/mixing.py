"""Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899): random choice of how images are mixed in pairs."""

import dataclasses
from typing import Annotated, NamedTuple

import numpy as np

from vitrail.core.rng import Stream
from vitrail.core.settings import Bounds, Pair
from vitrail.data.augment.base import Augmentation


class Mixture(NamedTuple):
    """How each image of a batch is mixed with its neighbour: 0 with 1, 2 with 3, and so on.

    The last image of an odd number is not mixed.
    """

    partner: np.ndarray
    """Index of the other image in the batch."""
    share: np.ndarray
    """Weight of the label of the image itself; 1 if it is not mixed."""
    boxes: np.ndarray
    """Box (top, left, height, width) that CutMix fills with the other image; empty for Mixup."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixing(Augmentation):
    """Mix images in pairs by Mixup or CutMix."""

    mixup: Annotated[float, Bounds(0.01, 1, or_zero=True)] = 0.0
    """Alpha of Mixup (arXiv 1710.09412), up to 1; 0 is off."""
    cutmix: Annotated[float, Bounds(0.01, 1, or_zero=True)] = 0.0
    """Alpha of CutMix (arXiv 1905.04899), up to 1; with Mixup, each image gets one of the two at random."""

    @property
    def is_active(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @property
    def mixes(self) -> bool:
        return True

    def mixture(self, stream: Stream, size: Pair, alone: np.ndarray | None) -> Mixture:
        """Return a random mixture of a batch of samples. `alone` marks samples that must not be mixed.

        Neighbours in a shuffled order are random partners. Each rank's part of a batch contains complete pairs, for any
        number of ranks.
        """
        count = len(stream.index)
        indices = np.arange(count)
        partner = np.where(indices ^ 1 < count, indices ^ 1, indices)
        is_cut = stream.uniform("cut or mix") < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        shares = [
            stream.beta(alpha, name) if alpha else np.ones(count)
            for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix))
        ]
        height, width = size
        side = np.sqrt(1 - shares[1])
        tall, wide = np.rint(height * side), np.rint(width * side)
        middle_down, middle_right = stream.integers(height, "cut down"), stream.integers(width, "cut right")
        top, bottom = (np.clip(middle_down + half, 0, height) for half in (-(tall // 2), tall - tall // 2))
        left, right = (np.clip(middle_right + half, 0, width) for half in (-(wide // 2), wide - wide // 2))
        is_alone = partner == indices
        if alone is not None:
            is_alone |= alone | alone[partner]
        is_cut &= ~is_alone
        boxes = np.stack([top, left, bottom - top, right - left], axis=1).astype(np.int64) * is_cut[:, None]
        share = np.where(is_cut, 1 - boxes[:, 2] * boxes[:, 3] / (height * width), shares[0])
        return Mixture(partner, np.where(is_alone, 1.0, share), boxes)
