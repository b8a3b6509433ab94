"""Fixed sinusoids of the raster index ("Attention Is All You Need", section 3.5)."""

from typing import TYPE_CHECKING

from vitrail.models.config import Table
from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models.families.vit.model import ViT


class SinCos1D(Position):
    """Fixed sinusoids of the raster index; prefix tokens have none."""

    only_adds = True
    width_multiple = 2

    @property
    def table_shapes(self) -> dict[str, Table]:
        return {"sincos": Table((self.config.tokens, self.config.width), "float64")}

    def tables(self) -> "dict[str, Tensor]":
        from torch.nn.functional import pad

        return {"sincos": pad(self.grid_table(), (0, 0, self.config.prefix, 0))}

    def grid_table(self) -> "Tensor":
        """Return the sinusoids of every patch (N, D)."""
        import torch

        from vitrail.models.positions.grid import sinusoids

        return sinusoids(torch.arange(self.config.patches, device="cpu"), self.config.width)

    def added(self, model: "ViT", layer: int) -> "Tensor":
        return model.get_buffer("sincos")
