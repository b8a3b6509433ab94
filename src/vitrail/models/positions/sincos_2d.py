"""Fixed sinusoids, half of the features by row and half by column."""

from typing import TYPE_CHECKING

from vitrail.models.positions.sincos_1d import SinCos1D

if TYPE_CHECKING:
    from torch import Tensor


class SinCos2D(SinCos1D):
    """Fixed sinusoids of the row and of the column; prefix tokens have none."""

    width_multiple = 4

    def grid_table(self) -> "Tensor":
        import torch

        from vitrail.models.positions.grid import grid_coordinates, sinusoids

        halves = [sinusoids(coordinate, self.config.width // 2) for coordinate in grid_coordinates(self.config.grid)]
        return torch.cat(halves, dim=1)
