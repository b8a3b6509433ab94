"""Rotary positions: queries and keys are rotated, half of the angles by row and half by column (arXiv 2403.13298)."""

import math
from typing import TYPE_CHECKING

from vitrail.core.errors import UsageError
from vitrail.models.config import Table
from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.model import ViT

# The base of RoPE for ViT: grids are tens of patches wide, whereas texts are thousands of words long.
_BASE = 100.0


class Rope2D(Position):
    """Queries and keys are rotated by angles proportional to row and column."""

    placements = ("every",)
    can_wrap = True

    def check(self) -> None:
        width, heads = self.config.width, self.config.heads
        if width // heads % 4:
            raise UsageError(
                f"Width / heads must be a multiple of 4 for position {self.config.position}, got {width} / {heads} ="
                f" {width // heads}."
            )

    @property
    def table_shapes(self) -> dict[str, Table]:
        angles = self.config.width // self.config.heads // 2
        return {"rope": Table((2, self.config.tokens, angles), "float64")}

    def tables(self) -> "dict[str, Tensor]":
        """`rope`: cosines and sines (2, T, K/2). Half of the angles depend on the row, half on the column; prefix
        tokens are not rotated.

        With `wrap`, every frequency is rounded to an integer number of turns around the grid, so that the first patch
        follows the last one of a row.
        """
        import torch
        from torch.nn.functional import pad

        from vitrail.models.positions.grid import grid_coordinates

        config = self.config
        frequencies = config.width // config.heads // 4
        octaves = torch.arange(frequencies, dtype=torch.float64, device="cpu") / frequencies
        angles = []
        for side, coordinate in zip(config.grid, grid_coordinates(config.grid), strict=True):
            speed = _BASE**-octaves
            if config.wrap:
                turn = 2 * math.pi / side
                speed = (speed / turn).round().clamp(min=1) * turn
            angles.append(coordinate.double()[:, None] * speed)
        turns = pad(torch.cat(angles, dim=1), (0, 0, config.prefix, 0))
        return {"rope": torch.stack([turns.cos(), turns.sin()])}

    def rotation(self, model: "ViT") -> "Tensor":
        return model.get_buffer("rope")
