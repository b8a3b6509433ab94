"""Tables over a grid of patches, with torch: coordinates, sinusoids, offsets, and resizing.

Shapes: h x w grid of patches, N = h*w, T = prefix + N tokens, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.settings import Pair
from vitrail.models.families.vit.config import ResizeRule, ViTConfig

# Wavelengths from 2 pi to 10,000 * 2 pi, as in "Attention Is All You Need" (section 3.5).
_SINCOS_BASE = 10_000.0


def with_prefix(class_row: Tensor, grid: Tensor, config: ViTConfig) -> Tensor:
    """Return a table for all tokens (T, D), with zeros for registers and for a [CLS] without a position."""
    zero_rows = grid.new_zeros(config.tokens - len(class_row) - len(grid), config.width)
    return torch.cat([class_row, zero_rows, grid])


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Return sinusoids of `width / 2` wavelengths for each position: (len(positions), width), sines first."""
    octaves = torch.arange(width // 2, dtype=torch.float64, device="cpu") / (width // 2)
    angles = positions.double()[:, None] * _SINCOS_BASE**-octaves
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def grid_coordinates(grid: Pair) -> tuple[Tensor, Tensor]:
    """Return the row and the column of every patch in raster order, each (N,)."""
    index = torch.arange(grid[0] * grid[1], device="cpu")
    return index // grid[1], index % grid[1]


def offsets(side: int) -> Tensor:
    """Return all offsets between two of `side` positions, in increasing order: (2 * side - 1,)."""
    return torch.arange(1 - side, side, device="cpu")


def by_offset(values: Tensor) -> Tensor:
    """Return a table (side, side) from a value for each of `offsets(side)`: entry [i, j] is the value of i - j."""
    return values.unfold(0, (len(values) + 1) // 2, 1).flip(1)


def resize_grid(table_hwD: Tensor, grid: Pair, rule: ResizeRule) -> Tensor:
    """Interpolate a learned table to another grid: (h, w, D) -> (h', w', D), as the library `rule` does.

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
