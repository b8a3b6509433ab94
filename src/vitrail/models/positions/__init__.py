"""The registry of the ViT's position embeddings. Each has a file of this package and a line below.

A file has one class with the rules, the costs and the computation of a position embedding. Rules and costs need no
torch, so that `vitrail info` stays fast: methods that compute import it themselves.
"""

from typing import TYPE_CHECKING

from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.models.positions.base import Position

POSITIONS: "Registry[type[Position]]" = Registry(
    "position",
    {
        "none": "vitrail.models.positions.none:NoPosition",
        "learned-1d": "vitrail.models.positions.learned_1d:Learned1D",
        "learned-2d": "vitrail.models.positions.learned_2d:Learned2D",
        "sincos-1d": "vitrail.models.positions.sincos_1d:SinCos1D",
        "sincos-2d": "vitrail.models.positions.sincos_2d:SinCos2D",
        "relative": "vitrail.models.positions.relative:Relative",
        "rope-2d": "vitrail.models.positions.rope_2d:Rope2D",
    },
    base="vitrail.models.positions.base:Position",
)
