"""Learned positions, half of the features by row and half by column."""

from typing import TYPE_CHECKING

from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.config import ViTConfig
    from vitrail.models.families.vit.model import ViT


class Learned2D(Position):
    """Parameters `pos_embed_row` and `pos_embed_column`, half of the features each, and `pos_embed_cls` for [CLS]."""

    only_adds = True
    width_multiple = 2
    origin, learned = "factored", ("pos_embed_row", "pos_embed_column")

    @property
    def parameters(self) -> int:
        c = self.config
        return self.table_count * (sum(c.grid) * c.width // 2 + c.positioned_class * c.width)

    def add_parameters(self, model: "ViT") -> None:
        import torch

        c = self.config
        shapes = {"row": (c.grid[0], c.width // 2), "column": (c.grid[1], c.width // 2)}
        if c.positioned_class:
            shapes["cls"] = (1, c.width)
        for name, shape in shapes.items():
            table = torch.nn.Parameter(torch.zeros(self.table_count, *shape))
            model.register_parameter(f"pos_embed_{name}", table)

    def init_weights(self, model: "ViT") -> None:
        from torch.nn import init

        init.normal_(model.get_parameter("pos_embed_row"), std=0.02)
        init.normal_(model.get_parameter("pos_embed_column"), std=0.02)
        if self.config.positioned_class:
            init.normal_(model.get_parameter("pos_embed_cls"), std=0.02)

    def added(self, model: "ViT", layer: int) -> "Tensor":
        import torch

        from vitrail.models.positions.grid import with_prefix

        c = self.config
        table = layer if c.placement == "every" else 0
        rows = model.get_parameter("pos_embed_row")[table][:, None].expand(-1, c.grid[1], -1)
        columns = model.get_parameter("pos_embed_column")[table][None].expand(c.grid[0], -1, -1)
        grid = torch.cat([rows, columns], dim=-1).flatten(0, 1)
        return with_prefix(model.get_parameter("pos_embed_cls")[table] if c.positioned_class else grid[:0], grid, c)

    def without_class(self, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
        return {name: tensor for name, tensor in tensors.items() if name != "pos_embed_cls"}

    def resized(self, name: str, table: "Tensor", new: "ViTConfig") -> "Tensor":
        import torch

        from vitrail.models.positions.grid import resize_grid

        side = new.grid[self.learned.index(name)]
        return torch.stack([resize_grid(plane[:, None], (side, 1), new.resize_rule)[:, 0] for plane in table])
