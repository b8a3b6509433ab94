"""Learned positions as in the ViT paper: a row for each patch in raster order, and a row for [CLS]."""

from typing import TYPE_CHECKING

from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.config import ViTConfig
    from vitrail.models.families.vit.model import ViT


class Learned1D(Position):
    """Parameter `pos_embed` (tables, rows, D): a row for [CLS], then a row for each patch in raster order."""

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
        table = model.get_parameter("pos_embed")[layer if c.placement == "every" else 0]
        if len(table) == c.tokens:
            return table
        return with_prefix(table[: c.positioned_class], table[c.positioned_class :], c)

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

        class_rows = self.config.positioned_class
        class_row, grid = table[:, :class_rows], table[:, class_rows:]
        planes = [resize_grid(plane.unflatten(0, self.config.grid), new.grid, new.resize_rule) for plane in grid]
        return torch.cat([class_row, torch.stack([plane.flatten(0, 1) for plane in planes])], dim=1)
