"""Settings of the margin softmax loss over identities: CosFace, ArcFace, SphereFace and combinations."""

import dataclasses
import math
from typing import Annotated, ClassVar

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarginSettings(Settings):
    """Margin and scale of the softmax over identities.

    The logit of the identity of an image, at the angle t from the weights of that identity, is
    scale * (cos(factor * t + angle) - cosine); the logit of every other identity is scale * cos(t).

    The default is CosFace (arXiv 1801.09414); `angle=0.5, cosine=0` is ArcFace (arXiv 1801.07698).
    """

    title: ClassVar[str] = "Margin"

    cosine: Annotated[float, Bounds(0, below=1)] = 0.35
    """Subtracted from the cosine (CosFace)."""
    angle: Annotated[float, Bounds(0, below=math.pi / 2)] = 0.0
    """Added to the angle, in radians (ArcFace)."""
    factor: Annotated[float, Bounds(1, below=5)] = 1.0
    """Multiplies the angle (SphereFace)."""
    scale: Annotated[float | None, Bounds(1e-3, below=1e4)] = None
    """Factor of all logits; 64 is usual for tens of thousands of identities. None: the fixed scale of AdaCos for the
    number of identities (arXiv 1905.00292), which suits small data sets."""
    warmup: Annotated[float, Bounds(0, 1)] = 0.3
    """Share of all steps in which the margin rises from 0 and the scale from that of AdaCos. Small data sets do not
    converge without it."""

    def scale_for(self, identities: int) -> float:
        """Return the scale after the warm-up for this number of identities."""
        return adacos_scale(identities) if self.scale is None else self.scale


def adacos_scale(identities: int) -> float:
    """Return the fixed scale of AdaCos (eq. 12), sqrt(2) log(identities - 1), but at least 1.

    The lower bound is needed because the formula gives 0 for two identities.
    """
    if identities < 2:
        raise UsageError(f"Number of identities must be at least 2, got {identities}.")
    return max(math.sqrt(2) * math.log(identities - 1), 1.0) if identities > 2 else 1.0
