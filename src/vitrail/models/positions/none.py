"""No position embedding."""

from typing import TYPE_CHECKING

from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.model import ViT


class NoPosition(Position):
    """Tokens are a set: their order does not matter."""

    only_adds = True
    placements = ("once",)

    def permute_patches(self, model: "ViT", order_N: "Tensor") -> bool:
        return True
