"""Where a patch was: fixed encodings, relative offsets, rotary angles, attention masks, and changing the grid.

Everything here is a pure function of the grid, so models at another resolution compute it anew; only learned tables
need `resize_grid`. Tables are made in double precision on the CPU: not every device has that.
Shapes: h x w grid of patches, N = h*w, T = prefix + N tokens, D width, K head width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.configs.vit import ResizeRule, ViTConfig
from vitrail.settings import Pair

# Wavelengths from 2 pi to 10,000 * 2 pi, as in "Attention Is All You Need" (section 3.5).
_SINCOS_BASE = 10_000.0
# Grids are tens of patches wide, not thousands of words long: the base that RoPE for ViT uses (arXiv 2403.13298).
_ROPE_BASE = 100.0

# The parameters whose shape follows from the grid.
LEARNED_TABLES = ("pos_embed", "pos_embed_row", "pos_embed_column", "relative_bias")


def sincos_1d(positions: Tensor, width: int) -> Tensor:
    """Sinusoids of `width / 2` wavelengths for each position: (len(positions), width), sines first."""
    octaves = torch.arange(width // 2, dtype=torch.float64, device="cpu") / (width // 2)
    angles = positions.double()[:, None] * _SINCOS_BASE**-octaves
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def grid_coordinates(grid: Pair) -> tuple[Tensor, Tensor]:
    """Row and column of every patch in raster order, each (N,)."""
    index = torch.arange(grid[0] * grid[1], device="cpu")
    return index // grid[1], index % grid[1]


def sincos_grid(kind: str, grid: Pair, width: int) -> Tensor:
    """The fixed table (N, D): by raster index (`sincos-1d`), or half by row and half by column (`sincos-2d`)."""
    if kind == "sincos-1d":
        return sincos_1d(torch.arange(grid[0] * grid[1], device="cpu"), width)
    rows, columns = grid_coordinates(grid)
    return torch.cat([sincos_1d(rows, width // 2), sincos_1d(columns, width // 2)], dim=1)


def rope_table(config: ViTConfig) -> Tensor:
    """Cosines and sines (2, T, K/2): half of the angles turn with the row, half with the column; prefix tokens stay.

    With `wrap`, every frequency is rounded to a whole number of turns around the grid, so that the last patch of a row
    is followed by the first.
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
    """For each pair of tokens (T, T), which entry of the relative table speaks of it.

    Patches share an entry when they have the same offset (modulo the grid with `wrap`); the last three entries are for
    patch to prefix, prefix to patch and prefix to prefix.
    """
    h, w = config.grid
    rows, columns = grid_coordinates(config.grid)
    down, right = rows[:, None] - rows, columns[:, None] - columns
    patches = (down % h) * w + right % w if config.wrap else (down + h - 1) * (2 * w - 1) + right + w - 1
    if not config.prefix:
        return patches
    index = torch.empty(config.tokens, config.tokens, dtype=torch.long, device="cpu")
    last = config.relative_offsets - 1
    index[:] = last
    index[config.prefix :, : config.prefix] = last - 2
    index[: config.prefix, config.prefix :] = last - 1
    index[config.prefix :, config.prefix :] = patches
    return index


def attention_mask(config: ViTConfig) -> Tensor:
    """Who may look at whom, (T, T) boolean. Prefix tokens see and are seen by all."""
    rows, columns = grid_coordinates(config.grid)
    if config.attention == "local":
        down, right = (rows[:, None] - rows).abs(), (columns[:, None] - columns).abs()
        if config.wrap:
            down, right = torch.minimum(down, config.grid[0] - down), torch.minimum(right, config.grid[1] - right)
        near = torch.maximum(down, right) <= config.span
    else:
        # Sparse Transformers (arXiv 1904.10509, section 4.2), without causality: a run of neighbours in raster order,
        # and every span-th patch; with the default span, the row around a patch and its column.
        raster = torch.arange(config.patches, device="cpu")
        lag = (raster[:, None] - raster).abs()
        near = (lag < config.span) | (lag % config.span == 0)
    return F.pad(near, (config.prefix, 0, config.prefix, 0), value=True)


def resize_grid(table_hwD: Tensor, grid: Pair, rule: ResizeRule) -> Tensor:
    """A learned table on another grid: (h, w, D) -> (h', w', D), by the arithmetic of the library that `rule` names.

    The four differ by several per cent of the table's size, so a checkpoint gives another model under another rule.
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


def resize_table(name: str, table: Tensor, old: ViTConfig, new: ViTConfig) -> Tensor:
    """A learned position table for another grid; the rows of [CLS] and prefix tokens are kept as they are."""
    rule = new.resize_rule
    (h, w), (rows, columns) = old.grid, new.grid
    if name == "pos_embed":
        class_row, grid = table[:, : old.positioned_class], table[:, old.positioned_class :]
        planes = [resize_grid(plane.unflatten(0, (h, w)), (rows, columns), rule).flatten(0, 1) for plane in grid]
        return torch.cat([class_row, torch.stack(planes)], dim=1)
    if name == "relative_bias":
        prefix = 3 if old.prefix else 0
        if old.wrap:
            return table.clone()
        offsets, others = table[:, : table.shape[1] - prefix], table[:, table.shape[1] - prefix :]
        square_hwH = offsets.unflatten(1, (2 * h - 1, 2 * w - 1)).permute(1, 2, 0)
        resized_hwH = resize_grid(square_hwH, (2 * rows - 1, 2 * columns - 1), rule)
        return torch.cat([resized_hwH.flatten(0, 1).T, others], dim=1)
    side = rows if name == "pos_embed_row" else columns
    return torch.stack([resize_grid(plane[:, None], (side, 1), rule)[:, 0] for plane in table])
