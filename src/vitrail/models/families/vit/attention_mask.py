"""Masks of sparse attention between patches: the local window and the strided pattern."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.positions.grid import by_offset, offsets


def _local_window(side: int, config: ViTConfig) -> Tensor:
    """Return a boolean table (side, side) of the rows (or columns) in the local window of each row (or column)."""
    lag = offsets(side).abs()
    return by_offset((torch.minimum(lag, side - lag) if config.wrap else lag) <= config.span)


def attention_mask(config: ViTConfig) -> Tensor:
    """Return a boolean mask (T, T) of the tokens that each token attends to. Prefix tokens attend to all tokens, and
    all tokens attend to them."""
    patches = config.patches
    if config.attention == "local":
        near_hh, near_ww = (_local_window(side, config) for side in config.grid)
        near = (near_hh[:, None, :, None] & near_ww[:, None]).reshape(patches, patches)
    else:
        # Sparse Transformers (arXiv 1904.10509, section 4.2), without causality: neighbours in raster order, and
        # every span-th patch. With the default span these are about the row and the column of a patch.
        lag = offsets(patches).abs()
        near = by_offset((lag < config.span) | (lag % config.span == 0))
    return F.pad(near, (config.prefix, 0, config.prefix, 0), value=True)
