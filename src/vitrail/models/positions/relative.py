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
        return {"relative": Table((self.config.tokens, self.config.tokens), "int64")}

    def add_parameters(self, model: "ViT") -> None:
        import torch

        for owner in self._owners(model):
            table = torch.nn.Parameter(torch.zeros(self.config.heads, self.offsets))
            owner.register_parameter("relative_bias", table)

    def tables(self) -> "dict[str, Tensor]":
        return {"relative": self._index()}

    def bias(self, model: "ViT", layer: int) -> "Tensor":
        owners = self._owners(model)
        return owners[layer if len(owners) > 1 else 0].get_parameter("relative_bias")[:, model.get_buffer("relative")]

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

    def _owners(self, model: "ViT") -> "list[nn.Module]":
        return [model] if self.config.placement == "shared" else list(model.blocks)

    def _index(self) -> "Tensor":
        """Return the index in the learned table for each pair of tokens (T, T).

        Patches share an entry when they have the same offset (modulo the grid with `wrap`); the last three entries are
        for patch to prefix, prefix to patch and prefix to prefix.
        """
        import torch

        from vitrail.models.positions.grid import by_offset, offsets

        config = self.config
        h, w = config.grid
        down, right = offsets(h), offsets(w)
        if config.wrap:
            down, right = down % h * w, right % w
        else:
            down, right = (down + h - 1) * (2 * w - 1), right + w - 1
        patches = (by_offset(down)[:, None, :, None] + by_offset(right)[:, None]).reshape(h * w, h * w)
        if not config.prefix:
            return patches
        index = torch.empty(config.tokens, config.tokens, dtype=torch.long, device="cpu")
        last = self.offsets - 1
        index[:] = last
        index[config.prefix :, : config.prefix] = last - 2
        index[: config.prefix, config.prefix :] = last - 1
        index[config.prefix :, config.prefix :] = patches
        return index
