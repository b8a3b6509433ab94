"""The kinds of position embedding, and the fixed tables they use.

A kind is a class: its parameters, what it adds to tokens, how it rotates queries and keys or biases attention, and how
it is resized to another grid. Its rules and costs are in `rules.py`. Fixed tables are pure functions of the
grid, computed in double precision on the CPU (not every device has that), and with few temporary copies if they grow
with tokens squared. Shapes: h x w grid of patches, N = h*w, T = prefix + N tokens, D width, H heads, K head width.
"""

import math
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.core.errors import UsageError
from vitrail.core.settings import Pair
from vitrail.models.families.vit.config import ResizeRule, ViTConfig
from vitrail.models.positions import rules

# Wavelengths from 2 pi to 10,000 * 2 pi, as in "Attention Is All You Need" (section 3.5).
_SINCOS_BASE = 10_000.0
# Grids are tens of patches wide, not thousands of words long: the base that RoPE for ViT uses (arXiv 2403.13298).
_ROPE_BASE = 100.0

if TYPE_CHECKING:
    from vitrail.models.families.vit.model import ViT


class Position:
    """A kind of position embedding in a ViT. This one does nothing.

    Parameters are registered in the model and its blocks, under timm's names.
    """

    origin: Literal["learned", "factored", "fixed"] = "fixed"
    """Origin of its table: learned, learned as a row part and a column part, or fixed."""
    learned: tuple[str, ...] = ()
    """Name endings of the parameters whose shape depends on the grid."""

    def __init__(self, config: ViTConfig) -> None:
        self.config = config

    def add_parameters(self, model: "ViT") -> None:
        """Register the parameters of this kind in the model or its blocks."""

    def init_weights(self, model: "ViT") -> None:
        """Initialise them."""

    def tables(self) -> dict[str, Tensor]:
        """Fixed tables, by their attribute names in the model."""
        return {}

    def added(self, model: "ViT", layer: int) -> Tensor | None:
        """What is added to the tokens (T, D) before `layer`."""
        return None

    def rotation(self, model: "ViT") -> Tensor | None:
        """Cosines and sines (2, T, K/2) of the rotation of queries and keys."""
        return None

    def bias(self, model: "ViT", layer: int) -> Tensor | None:
        """What is added to the attention logits of `layer`, (H, T, T)."""
        return None

    def reindex(self, model: "ViT", order_N: Tensor) -> bool:
        """Change parameters so that patches in this order are where they were; False, and nothing changes, where they
        cannot follow."""
        return False

    def without_class(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The parameters of a model, by name, without the position of [CLS]."""
        return dict(tensors)

    def check_resize(self, new: ViTConfig) -> None:
        """Refuse a grid to which this kind cannot be resized."""

    def resized(self, name: str, table: Tensor, new: ViTConfig) -> Tensor:
        """One of the `learned` parameters, resized to the grid of another configuration."""
        raise NotImplementedError


class NoPosition(Position):
    """Tokens are a set."""

    def reindex(self, model: "ViT", order_N: Tensor) -> bool:
        return True


class Learned1D(Position):
    """`pos_embed`: a row for [CLS], then one for each patch in raster order, (tables, rows, D)."""

    origin, learned = "learned", ("pos_embed",)

    def add_parameters(self, model: "ViT") -> None:
        c = self.config
        rows = c.positioned_class + c.patches
        model.register_parameter("pos_embed", nn.Parameter(torch.zeros(c.position_rules.tables, rows, c.width)))

    def init_weights(self, model: "ViT") -> None:
        nn.init.normal_(model.get_parameter("pos_embed"), std=0.02)  # AddPositionEmbs: normal(stddev=0.02)

    def added(self, model: "ViT", layer: int) -> Tensor:
        c = self.config
        own = model.get_parameter("pos_embed")[layer if c.placement == "every" else 0]
        if len(own) == c.tokens:
            return own
        return _with_prefix(own[: c.positioned_class], own[c.positioned_class :], c)

    @torch.no_grad()
    def reindex(self, model: "ViT", order_N: Tensor) -> bool:
        rows = model.get_parameter("pos_embed")[:, self.config.positioned_class :]
        rows.copy_(rows[:, order_N.to(rows.device)])
        return True

    def without_class(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, "pos_embed": tensors["pos_embed"][:, self.config.positioned_class :]}

    def resized(self, name: str, table: Tensor, new: ViTConfig) -> Tensor:
        first = self.config.positioned_class
        class_row, grid = table[:, :first], table[:, first:]
        planes = [resize_grid(plane.unflatten(0, self.config.grid), new.grid, new.resize_rule) for plane in grid]
        return torch.cat([class_row, torch.stack([plane.flatten(0, 1) for plane in planes])], dim=1)


class Learned2D(Position):
    """`pos_embed_row` and `pos_embed_column`: half of the features each; `pos_embed_cls` for [CLS]."""

    origin, learned = "factored", ("pos_embed_row", "pos_embed_column")

    def add_parameters(self, model: "ViT") -> None:
        c = self.config
        tables = c.position_rules.tables
        model.register_parameter("pos_embed_row", nn.Parameter(torch.zeros(tables, c.grid[0], c.width // 2)))
        model.register_parameter("pos_embed_column", nn.Parameter(torch.zeros(tables, c.grid[1], c.width // 2)))
        if c.positioned_class:
            model.register_parameter("pos_embed_cls", nn.Parameter(torch.zeros(tables, 1, c.width)))

    def init_weights(self, model: "ViT") -> None:
        nn.init.normal_(model.get_parameter("pos_embed_row"), std=0.02)
        nn.init.normal_(model.get_parameter("pos_embed_column"), std=0.02)
        if self.config.positioned_class:
            nn.init.normal_(model.get_parameter("pos_embed_cls"), std=0.02)

    def added(self, model: "ViT", layer: int) -> Tensor:
        c = self.config
        table = layer if c.placement == "every" else 0
        rows = model.get_parameter("pos_embed_row")[table][:, None].expand(-1, c.grid[1], -1)
        columns = model.get_parameter("pos_embed_column")[table][None].expand(c.grid[0], -1, -1)
        grid = torch.cat([rows, columns], dim=-1).flatten(0, 1)
        return _with_prefix(model.get_parameter("pos_embed_cls")[table] if c.positioned_class else grid[:0], grid, c)

    def without_class(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name != "pos_embed_cls"}

    def resized(self, name: str, table: Tensor, new: ViTConfig) -> Tensor:
        side = new.grid[self.learned.index(name)]
        return torch.stack([resize_grid(plane[:, None], (side, 1), new.resize_rule)[:, 0] for plane in table])


class SinCos1D(Position):
    """Fixed sinusoids of the raster index; prefix tokens have none."""

    def tables(self) -> dict[str, Tensor]:
        return {"sincos": F.pad(self.grid_table(), (0, 0, self.config.prefix, 0))}

    def grid_table(self) -> Tensor:
        """The sinusoids of every patch (N, D)."""
        return sincos_1d(torch.arange(self.config.patches, device="cpu"), self.config.width)

    def added(self, model: "ViT", layer: int) -> Tensor:
        return model.get_buffer("sincos")


class SinCos2D(SinCos1D):
    """Fixed sinusoids, half of the features by row and half by column."""

    def grid_table(self) -> Tensor:
        halves = [sincos_1d(place, self.config.width // 2) for place in grid_coordinates(self.config.grid)]
        return torch.cat(halves, dim=1)


class Relative(Position):
    """`relative_bias`: a number for each head and offset, (H, offsets), of the model or of each block.

    A learned bias needs a gradient, for which the CPU has no fused kernel: relative positions train slower.
    """

    learned = ("relative_bias",)

    def add_parameters(self, model: "ViT") -> None:
        for owner in self._owners(model):
            owner.register_parameter("relative_bias", nn.Parameter(torch.zeros(self.config.heads, self._offsets)))

    def tables(self) -> dict[str, Tensor]:
        return {"relative": relative_index(self.config)}

    def bias(self, model: "ViT", layer: int) -> Tensor:
        owners = self._owners(model)
        return owners[layer if len(owners) > 1 else 0].get_parameter("relative_bias")[:, model.get_buffer("relative")]

    def check_resize(self, new: ViTConfig) -> None:
        if self.config.wrap and new.grid != self.config.grid:
            raise UsageError("Resize must keep the grid of relative positions with wrap: they cannot be interpolated.")

    def resized(self, name: str, table: Tensor, new: ViTConfig) -> Tensor:
        if self.config.wrap:
            return table.clone()
        (h, w), (rows, columns) = self.config.grid, new.grid
        count = table.shape[1] - (3 if self.config.prefix else 0)
        square_hwH = table[:, :count].unflatten(1, (2 * h - 1, 2 * w - 1)).permute(1, 2, 0)
        resized_hwH = resize_grid(square_hwH, (2 * rows - 1, 2 * columns - 1), new.resize_rule)
        return torch.cat([resized_hwH.flatten(0, 1).T, table[:, count:]], dim=1)

    @property
    def _offsets(self) -> int:
        return cast(rules.Relative, self.config.position_rules).offsets

    def _owners(self, model: "ViT") -> list[nn.Module]:
        return [model] if self.config.placement == "shared" else list(model.blocks)


class Rope2D(Position):
    """Queries and keys are rotated by angles proportional to row and column."""

    def tables(self) -> dict[str, Tensor]:
        return {"rope": rope_table(self.config)}

    def rotation(self, model: "ViT") -> Tensor:
        return model.get_buffer("rope")


def _with_prefix(class_row: Tensor, grid: Tensor, config: ViTConfig) -> Tensor:
    """A table for all tokens (T, D), with zeros for registers and for a [CLS] without a position."""
    nowhere = grid.new_zeros(config.tokens - len(class_row) - len(grid), config.width)
    return torch.cat([class_row, nowhere, grid])


def sincos_1d(positions: Tensor, width: int) -> Tensor:
    """Sinusoids of `width / 2` wavelengths for each position: (len(positions), width), sines first."""
    octaves = torch.arange(width // 2, dtype=torch.float64, device="cpu") / (width // 2)
    angles = positions.double()[:, None] * _SINCOS_BASE**-octaves
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def grid_coordinates(grid: Pair) -> tuple[Tensor, Tensor]:
    """Row and column of every patch in raster order, each (N,)."""
    index = torch.arange(grid[0] * grid[1], device="cpu")
    return index // grid[1], index % grid[1]


def rope_table(config: ViTConfig) -> Tensor:
    """Cosines and sines (2, T, K/2): half of the angles depend on the row, half on the column; prefix tokens are not
    rotated.

    With `wrap`, every frequency is rounded to an integer number of turns around the grid, so that the first patch
    follows the last one of a row.
    """
    frequencies = config.width // config.heads // 4
    octaves = torch.arange(frequencies, dtype=torch.float64, device="cpu") / frequencies
    angles = []
    for side, coordinate in zip(config.grid, grid_coordinates(config.grid), strict=True):
        speed = _ROPE_BASE**-octaves
        if config.wrap:
            turn = 2 * math.pi / side
            speed = (speed / turn).round().clamp(min=1) * turn
        angles.append(coordinate.double()[:, None] * speed)
    turns = F.pad(torch.cat(angles, dim=1), (0, 0, config.prefix, 0))
    return torch.stack([turns.cos(), turns.sin()])


def relative_index(config: ViTConfig) -> Tensor:
    """For each pair of tokens (T, T), the index of its entry in the relative table.

    Patches share an entry when they have the same offset (modulo the grid with `wrap`); the last three entries are for
    patch to prefix, prefix to patch and prefix to prefix.
    """
    h, w = config.grid
    down, right = _offsets(h), _offsets(w)
    if config.wrap:
        down, right = down % h * w, right % w
    else:
        down, right = (down + h - 1) * (2 * w - 1), right + w - 1
    patches = (_by_offset(down)[:, None, :, None] + _by_offset(right)[:, None]).reshape(h * w, h * w)
    if not config.prefix:
        return patches
    index = torch.empty(config.tokens, config.tokens, dtype=torch.long, device="cpu")
    last = cast(rules.Relative, config.position_rules).offsets - 1
    index[:] = last
    index[config.prefix :, : config.prefix] = last - 2
    index[: config.prefix, config.prefix :] = last - 1
    index[config.prefix :, config.prefix :] = patches
    return index


def _offsets(side: int) -> Tensor:
    """All offsets between two of `side` positions, in increasing order."""
    return torch.arange(1 - side, side, device="cpu")


def _by_offset(values: Tensor) -> Tensor:
    """A value for each of `_offsets(side)` as a table (side, side): entry [i, j] is the value of i - j."""
    return values.unfold(0, (len(values) + 1) // 2, 1).flip(1)


def _is_near(side: int, config: ViTConfig) -> Tensor:
    """Boolean (side, side): which rows (or columns) are in the local window of each."""
    lag = _offsets(side).abs()
    return _by_offset((torch.minimum(lag, side - lag) if config.wrap else lag) <= config.span)


def attention_mask(config: ViTConfig) -> Tensor:
    """Boolean mask (T, T) of the tokens that each token attends to. Prefix tokens attend to all, and all to them."""
    patches = config.patches
    if config.attention == "local":
        near_hh, near_ww = (_is_near(side, config) for side in config.grid)
        near = (near_hh[:, None, :, None] & near_ww[:, None]).reshape(patches, patches)
    else:
        # Sparse Transformers (arXiv 1904.10509, section 4.2), without causality: a run of neighbours in raster order,
        # and every span-th patch; with the default span, the row around a patch and its column.
        lag = _offsets(patches).abs()
        near = _by_offset((lag < config.span) | (lag % config.span == 0))
    return F.pad(near, (config.prefix, 0, config.prefix, 0), value=True)


def resize_grid(table_hwD: Tensor, grid: Pair, rule: ResizeRule) -> Tensor:
    """A learned table on another grid: (h, w, D) -> (h', w', D), by the arithmetic of the library that `rule` names.

    The four results differ by several per cent, so a checkpoint gives other logits under another rule.
    """
    if table_hwD.shape[:2] == grid:
        return table_hwD.clone()
    planes_1Dhw = table_hwD.permute(2, 0, 1)[None].float()
    match rule:
        case "google":  # scipy.ndimage.zoom(order=1): linear, corner to corner
            resized = F.interpolate(planes_1Dhw, grid, mode="bilinear", align_corners=True)
        case "torchvision":
            resized = F.interpolate(planes_1Dhw, grid, mode="bicubic", align_corners=True)
        case "huggingface":
            resized = F.interpolate(planes_1Dhw, grid, mode="bicubic", align_corners=False)
        case "timm":
            resized = F.interpolate(planes_1Dhw, grid, mode="bicubic", align_corners=False, antialias=True)
    return resized[0].permute(1, 2, 0).to(table_hwD.dtype)
