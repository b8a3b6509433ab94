"""A learned number for each offset between two patches and each head, added to the attention logits."""

from typing import TYPE_CHECKING

from vitrail.core.errors import UsageError
from vitrail.models.config import Table
from vitrail.models.positions.base import Position

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitrail.models.families.vit.config import ViTConfig
    from vitrail.models.families.vit.model import ViT


class Relative(Position):
    """Parameter `relative_bias` (H, offsets) of the model or of each block: a number for each head and offset.

    Training is slower than with other positions: on CPU no fused kernel computes the gradient of a bias.
    """

    placements = ("every", "shared")
    can_wrap = True
    learned = ("relative_bias",)

    @property
    def parameters(self) -> int:
        return self.table_count * self.config.heads * self.offsets

    @property
    def offsets(self) -> int:
        """Entries of the table per head: one for each offset between two patches, and three for prefix tokens (patch to
        prefix, prefix to patch, prefix to prefix)."""
        rows, columns = self.config.grid
        offsets = rows * columns if self.config.wrap else (2 * rows - 1) * (2 * columns - 1)
        return offsets + (3 if self.config.prefix else 0)

    @property
    def table_shapes(self) -> dict[str, Table]:
        if self.config.sparse_parts:
            return {}
        return {"relative": Table((self.config.tokens, self.config.tokens), "int64")}

    def add_parameters(self, model: "ViT") -> None:
        import torch

        for owner in self._owners(model):
            table = torch.nn.Parameter(torch.zeros(self.config.heads, self.offsets))
            owner.register_parameter("relative_bias", table)

    def tables(self) -> "dict[str, Tensor]":
        return {} if self.config.sparse_parts else {"relative": self._all_pairs()}

    def bias(self, model: "ViT", layer: int) -> "Tensor":
        table = self._table(model, layer)
        return table[
            :, self._all_pairs().to(table.device) if self.config.sparse_parts else model.get_buffer("relative")
        ]

    def pair_bias(self, model: "ViT", layer: int, queries: "Tensor", keys: "Tensor") -> "Tensor":
        return self._table(model, layer)[:, self._index(queries, keys)]

    def check_resize(self, new: "ViTConfig") -> None:
        if self.config.wrap and new.grid != self.config.grid:
            raise UsageError("Resize must keep the grid of relative positions with wrap: they cannot be interpolated.")

    def resized(self, name: str, table: "Tensor", new: "ViTConfig") -> "Tensor":
        import torch

        from vitrail.models.positions.grid import resize_grid

        if self.config.wrap:
            return table.clone()
        (h, w), (rows, columns) = self.config.grid, new.grid
        count = table.shape[1] - (3 if self.config.prefix else 0)
        square_hwH = table[:, :count].unflatten(1, (2 * h - 1, 2 * w - 1)).permute(1, 2, 0)
        resized_hwH = resize_grid(square_hwH, (2 * rows - 1, 2 * columns - 1), new.resize_rule)
        return torch.cat([resized_hwH.flatten(0, 1).T, table[:, count:]], dim=1)

    def _table(self, model: "ViT", layer: int) -> "Tensor":
        owners = self._owners(model)
        return owners[layer if len(owners) > 1 else 0].get_parameter("relative_bias")

    def _owners(self, model: "ViT") -> "list[nn.Module]":
        return [model] if self.config.placement == "shared" else list(model.blocks)

    def _index(self, queries: "Tensor", keys: "Tensor") -> "Tensor":
        """Return the index in the learned table for pairs of tokens, whose indices are broadcast.

        Patches share an entry when they have the same offset (modulo the grid with `wrap`); the last three entries are
        for patch to prefix, prefix to patch and prefix to prefix.
        """
        import torch

        (h, w), prefix, last = self.config.grid, self.config.prefix, self.offsets - 1
        down = (queries - prefix) // w - (keys - prefix) // w
        right = (queries - prefix) % w - (keys - prefix) % w
        clipped = (down + h - 1) * (2 * w - 1) + right + w - 1
        index = down % h * w + right % w if self.config.wrap else clipped
        if not prefix:
            return index
        of_prefix = torch.where(queries < prefix, torch.where(keys < prefix, last, last - 1), last - 2)
        return torch.where((queries < prefix) | (keys < prefix), of_prefix, index)

    def _all_pairs(self) -> "Tensor":
        """Return `_index` for all pairs of tokens (T, T)."""
        import torch

        tokens = torch.arange(self.config.tokens, device="cpu")
        return self._index(tokens[:, None], tokens)
