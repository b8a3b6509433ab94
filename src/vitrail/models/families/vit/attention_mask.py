"""Tables of sparse attention between patches, local and strided: a mask of all pairs, or the indices of its parts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.families.vit.config import ViTConfig
from vitrail.models.families.vit.sparsity import Axis, Part, Residues, Tiles
from vitrail.models.positions.grid import by_offset, offsets


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


def _local_window(side: int, config: ViTConfig) -> Tensor:
    """Return a boolean table (side, side) of the rows (or columns) in the local window of each row (or column)."""
    lag = offsets(side).abs()
    return by_offset((torch.minimum(lag, side - lag) if config.wrap else lag) <= config.span)


def part_tables(part: Part, prefix: int) -> dict[str, Tensor]:
    """Return the fields of a `PatternPart` by name, with the mask as its bias."""
    queries_GQ, keys_GM, allowed_GQM = _residue_index(part) if isinstance(part, Residues) else _tile_index(part)
    order_N = torch.empty(int(queries_GQ.max()) + 1, dtype=torch.long, device="cpu")
    order_N[queries_GQ.flatten()] = torch.arange(queries_GQ.numel(), device="cpu")
    keys_GM = keys_GM + prefix
    if isinstance(part, Tiles):
        keys_GM = torch.cat([torch.arange(prefix, device="cpu").expand(len(keys_GM), -1), keys_GM], dim=1)
        allowed_GQM = F.pad(allowed_GQM, (prefix, 0), value=True)
    bias_GHQM = torch.zeros(allowed_GQM.shape, dtype=torch.float64, device="cpu").masked_fill_(~allowed_GQM, -torch.inf)
    return {"queries": queries_GQ, "keys": keys_GM, "order": order_N, "bias": bias_GHQM[:, None]}


def _tile_index(tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries (G, Q) and keys (G, M) of tiles, and whether each query attends to each key (G, Q, M)."""
    (query_row, key_row, near_row), (query_column, key_column, near_column) = map(
        _axis_index, (tiles.rows, tiles.columns)
    )
    width = tiles.columns.side

    def patch_index(rows: Tensor, columns: Tensor) -> Tensor:
        index = rows[:, None, :, None] * width + columns[None, :, None, :]
        return index.flatten(2).flatten(0, 1)

    near = near_row[:, None, :, None, :, None] & near_column[None, :, None, :, None, :]
    allowed_GQM = near.flatten(4).flatten(2, 3).flatten(0, 1)
    return patch_index(query_row, query_column), patch_index(key_row, key_column), allowed_GQM


def _axis_index(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each block of an axis, its queries, its keys, and which of them are near each other."""
    starts = torch.tensor(axis.starts, device="cpu")
    queries = (starts[:, None] + torch.arange(axis.block, device="cpu")).clamp(max=axis.side - 1)
    first_keys = torch.tensor([axis.first_key(start) for start in axis.starts], device="cpu")
    keys = (first_keys[:, None] + torch.arange(axis.window, device="cpu")) % axis.side
    lag = (queries[:, :, None] - keys[:, None]).abs()
    return queries, keys, (torch.minimum(lag, axis.side - lag) if axis.wraps else lag) <= axis.radius


def _residue_index(part: Residues) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_tile_index` returns, for patches of equal remainder. A patch itself is a key of its tile.

    Remainders with one patch less repeat their first one, as a masked key.
    """
    firsts_G1 = torch.arange(part.groups, device="cpu")[:, None]
    index_GQ = firsts_G1 + torch.arange(part.queries, device="cpu") * part.groups
    is_patch_GQ = index_GQ < part.patches
    patches_GQ = torch.where(is_patch_GQ, index_GQ, firsts_G1)
    return patches_GQ, patches_GQ, is_patch_GQ[:, None] & (patches_GQ[:, :, None] != patches_GQ[:, None])
