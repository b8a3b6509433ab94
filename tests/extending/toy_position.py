"""A position embedding: one learned row for each diagonal of the grid.

torch is imported by the methods that compute, because `vitrail info` needs the counts only.
"""

from typing import TYPE_CHECKING

from vitrail.models.config import Table
from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.config import ViTConfig
    from vitrail.models.families.vit.model import ViT


class Diagonal(Position):
    """`pos_embed_diagonal`: (tables, diagonals, D). Patches on one diagonal share a position."""

    origin, learned = "learned", ("pos_embed_diagonal",)

    @property
    def diagonals(self) -> int:
        """Number of diagonals from the top right to the bottom left."""
        return sum(self.config.grid) - 1

    @property
    def parameters(self) -> int:
        return self.table_count * self.diagonals * self.config.width

    @property
    def table_shapes(self) -> dict[str, Table]:
        return {"diagonal": Table((self.config.patches,), "int64")}

    def add_parameters(self, model: "ViT") -> None:
        import torch

        table = torch.zeros(self.table_count, self.diagonals, self.config.width)
        model.register_parameter("pos_embed_diagonal", torch.nn.Parameter(table))

    def init_weights(self, model: "ViT") -> None:
        from torch.nn import init

        init.normal_(model.get_parameter("pos_embed_diagonal"), std=0.02)

    def tables(self) -> "dict[str, Tensor]":
        from vitrail.models.positions.grid import grid_coordinates

        rows, columns = grid_coordinates(self.config.grid)
        return {"diagonal": rows + columns}

    def added(self, model: "ViT", layer: int) -> "Tensor":
        import torch

        table = model.get_parameter("pos_embed_diagonal")[layer if self.config.placement == "every" else 0]
        patches_ND = table[model.get_buffer("diagonal")]
        return torch.cat([patches_ND.new_zeros(self.config.prefix, self.config.width), patches_ND])

    def resized(self, name: str, table: "Tensor", new: "ViTConfig") -> "Tensor":
        import torch

        from vitrail.models.positions.grid import resize_grid

        side = Diagonal(new).diagonals
        return torch.stack([resize_grid(plane[:, None], (side, 1), new.resize_rule)[:, 0] for plane in table])
