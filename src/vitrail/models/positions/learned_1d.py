"""One learned row for each patch in raster order, and one for [CLS]: the paper's choice."""

from typing import TYPE_CHECKING

from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.config import ViTConfig
    from vitrail.models.families.vit.model import ViT


class Learned1D(Position):
    """`pos_embed`: a row for [CLS], then one for each patch in raster order, (tables, rows, D)."""

    only_adds = True
    origin, learned = "learned", ("pos_embed",)

    @property
    def parameters(self) -> int:
        return self.table_count * (self.config.patches + self.config.positioned_class) * self.config.width

    def add_parameters(self, model: "ViT") -> None:
        import torch

        c = self.config
        rows = c.positioned_class + c.patches
        model.register_parameter("pos_embed", torch.nn.Parameter(torch.zeros(self.table_count, rows, c.width)))

    def init_weights(self, model: "ViT") -> None:
        from torch.nn import init

        init.normal_(model.get_parameter("pos_embed"), std=0.02)  # AddPositionEmbs: normal(stddev=0.02)

    def added(self, model: "ViT", layer: int) -> "Tensor":
        from vitrail.models.positions.grid import with_prefix

        c = self.config
        own = model.get_parameter("pos_embed")[layer if c.placement == "every" else 0]
        if len(own) == c.tokens:
            return own
        return with_prefix(own[: c.positioned_class], own[c.positioned_class :], c)

    def permute_patches(self, model: "ViT", order_N: "Tensor") -> bool:
        import torch

        with torch.no_grad():
            rows = model.get_parameter("pos_embed")[:, self.config.positioned_class :]
            rows.copy_(rows[:, order_N.to(rows.device)])
        return True

    def without_class(self, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
        return {**tensors, "pos_embed": tensors["pos_embed"][:, self.config.positioned_class :]}

    def resized(self, name: str, table: "Tensor", new: "ViTConfig") -> "Tensor":
        import torch

        from vitrail.models.positions.grid import resize_grid

        first = self.config.positioned_class
        class_row, grid = table[:, :first], table[:, first:]
        planes = [resize_grid(plane.unflatten(0, self.config.grid), new.grid, new.resize_rule) for plane in grid]
        return torch.cat([class_row, torch.stack([plane.flatten(0, 1) for plane in planes])], dim=1)
