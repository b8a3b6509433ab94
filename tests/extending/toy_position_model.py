"""What the position `diagonal` adds to the tokens of a ViT."""

import torch
from torch import Tensor, nn
from toy_position import Diagonal

from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.model import ViT
from vitrail.models.positions.modules import Position, grid_coordinates, resize_grid


class DiagonalTable(Position):
    """`pos_embed_diagonal`: (tables, diagonals, D)."""

    origin, learned = "learned", ("pos_embed_diagonal",)

    def add_parameters(self, model: ViT) -> None:
        rules = Diagonal(self.config)
        table = torch.zeros(rules.tables, rules.diagonals, self.config.width)
        model.register_parameter("pos_embed_diagonal", nn.Parameter(table))

    def init_weights(self, model: ViT) -> None:
        nn.init.normal_(model.get_parameter("pos_embed_diagonal"), std=0.02)

    def tables(self) -> dict[str, Tensor]:
        rows, columns = grid_coordinates(self.config.grid)
        return {"diagonal": rows + columns}

    def added(self, model: ViT, layer: int) -> Tensor:
        table = model.get_parameter("pos_embed_diagonal")[layer if self.config.placement == "every" else 0]
        places_ND = table[model.get_buffer("diagonal")]
        return torch.cat([places_ND.new_zeros(self.config.prefix, self.config.width), places_ND])

    def resized(self, name: str, table: Tensor, new: ViTConfig) -> Tensor:
        side = Diagonal(new).diagonals
        return torch.stack([resize_grid(one[:, None], (side, 1), new.resize_rule)[:, 0] for one in table])
