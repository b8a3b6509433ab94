"""Margin and scale of the softmax over people: CosFace, ArcFace, and both together."""

import dataclasses
import math
from typing import Annotated, ClassVar

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds, Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarginSettings(Settings):
    """The logit of an image's own person, at the angle t from that person's weights, is
    scale * (cos(factor * t + angle) - cosine); that of others is scale * cos(t).

    The default is CosFace (arXiv 1801.09414); `angle=0.5, cosine=0` is ArcFace (arXiv 1801.07698).
    """

    title: ClassVar[str] = "Margin"

    cosine: Annotated[float, Bounds(0, below=1)] = 0.35
    """Taken from the cosine (CosFace)."""
    angle: Annotated[float, Bounds(0, below=math.pi / 2)] = 0.0
    """Added to the angle, in radians (ArcFace)."""
    factor: Annotated[float, Bounds(1, below=5)] = 1.0
    """Multiplies the angle (SphereFace)."""
    scale: Annotated[float | None, Bounds(1e-3, below=1e4)] = None
    """Factor of all logits; 64 where there are tens of thousands of people. None: AdaCos's fixed scale for the number
    of people (arXiv 1905.00292), which suits few."""
    warmup: Annotated[float, Bounds(0, 1)] = 0.3
    """Share of all steps in which the margin rises from none, and the scale from AdaCos's: few images do not converge
    without it."""

    def scale_for(self, people: int) -> float:
        """The scale for so many people, after the warm-up."""
        return adacos_scale(people) if self.scale is None else self.scale


def adacos_scale(people: int) -> float:
    """AdaCos's fixed scale (eq. 12), sqrt(2) log(people - 1); at least 1, because that is 0 for two people."""
    if people < 2:
        raise UsageError(f"People to tell apart must be at least 2, got {people}.")
    return max(math.sqrt(2) * math.log(people - 1), 1.0) if people > 2 else 1.0
