"""Which patches attend to which: the local window and the strided pattern."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.positions.grid import by_offset, offsets


def _is_near(side: int, config: ViTConfig) -> Tensor:
    """Boolean (side, side): which rows (or columns) are in the local window of each."""
    lag = offsets(side).abs()
    return by_offset((torch.minimum(lag, side - lag) if config.wrap else lag) <= config.span)


def attention_mask(config: ViTConfig) -> Tensor:
    """Boolean mask (T, T) of the tokens that each token attends to. Prefix tokens attend to all, and all to them."""
    patches = config.patches
    if config.attention == "local":
        near_hh, near_ww = (_is_near(side, config) for side in config.grid)
        near = (near_hh[:, None, :, None] & near_ww[:, None]).reshape(patches, patches)
    else:
        # Sparse Transformers (arXiv 1904.10509, section 4.2), without causality: a run of neighbours in raster order,
        # and every span-th patch; with the default span, the row around a patch and its column.
        lag = offsets(patches).abs()
        near = by_offset((lag < config.span) | (lag % config.span == 0))
    return F.pad(near, (config.prefix, 0, config.prefix, 0), value=True)
