"""No position embedding."""

from typing import TYPE_CHECKING

from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.model import ViT


class NoPosition(Position):
    """No position embedding: the model does not depend on the order of the patches."""

    only_adds = True
    placements = ("once",)

    def permute_patches(self, model: "ViT", order_N: "Tensor") -> bool:
        return True
