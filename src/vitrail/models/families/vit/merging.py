"""Token merging: similar patches become one token before a layer (the idea of arXiv 2210.09461).

Half of the patches are sources, the other half are targets, like the squares of a chessboard. The sources with the
lowest costs each join a target and form a group. A group is one token, the mean of its patches. Its size (the number of
its patches) enters attention as log(size): the group gets the attention that as many equal tokens would get.

The cost of a pair is the sum of squared distances that the group gains (Ward's criterion), times the square root of the
attention that [CLS] pays to the two tokens in the next layer: patches to which [CLS] pays little attention are merged
first. The sizes of the two tokens count in Ward's criterion only, not in the attention.

Shapes: B images, T tokens (first [CLS] and registers), S sources and C targets, R merged sources, M = T - R tokens
after merging, D width. Indices count through the rows of the complete batch (B * T): selecting rows of one matrix is
three times as fast as gathering along a dimension.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.core.settings import Pair
from vitrail.models.families.vit.config import ViTConfig


def merge_similar(
    z_BTD: Tensor,
    groups: "Groups | None",
    config: ViTConfig,
    layer: int,
    cls_attention: Callable[[Tensor], Tensor],
    board_N: Tensor | None,
) -> "tuple[Tensor, Groups | None]":
    """Merge the patches that `config.merge` sets for `layer`, before that layer. Return the tokens (B, M, D) and their
    groups.

    `cls_attention` computes the attention of [CLS] to each token in this layer (B, T). `board_N` is the `chessboard` of
    all patches.
    """
    count = config.merge_count(layer, z_BTD.shape[1] - config.prefix)
    if not count:
        return z_BTD, groups
    attention_BT = cls_attention(z_BTD) if config.pool == "cls" else None
    return merge(z_BTD, groups, match(z_BTD, config.prefix, count, board_N, groups, attention_BT))


class Match(NamedTuple):
    """A merge of one layer: the tokens that stay, and the tokens that join another token."""

    stays_BM: Tensor
    """For each token after merging, its row before merging."""
    joins_BR: Tensor
    """For each joining token, its row before merging."""
    into_BR: Tensor
    """For each joining token, the row of its target after merging."""


def match(
    x_BTD: Tensor,
    prefix: int,
    count: int,
    board_N: Tensor | None = None,
    groups: "Groups | None" = None,
    attention_BT: Tensor | None = None,
) -> Match:
    """Find the `count` sources that are cheapest to merge, and their targets.

    The `prefix` ([CLS] and registers) is never merged. The order after merging is: prefix, targets, remaining sources.
    `board_N` is the `chessboard` of all patches; if earlier layers merged or dropped patches, every second token is a
    source instead. `groups` are the groups of earlier merges. `attention_BT` is the attention of [CLS] to each token,
    for models whose head reads [CLS].
    """
    batch, tokens, _ = x_BTD.shape
    patches = tokens - prefix
    if board_N is None or len(board_N) != patches:
        index_N = torch.arange(patches, device=x_BTD.device)
        board_N = torch.cat([index_N[0::2], index_N[1::2]])
    sources = patches // 2

    def split_halves(values_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Split values of patches into values of targets (B, 1, C) and of sources (B, S, 1)."""
        targets_BC, sources_BS = values_BN.split([patches - sources, sources], dim=1)
        return targets_BC[:, None], sources_BS[:, :, None]

    centred_BND = x_BTD[:, prefix:].index_select(1, board_N)
    centred_BND = centred_BND - centred_BND.mean(dim=1, keepdim=True)  # products of centred vectors lose fewer digits
    targets_BCD, sources_BSD = centred_BND.split([patches - sources, sources], dim=1)
    squares_B1C, squares_BS1 = split_halves((centred_BND * centred_BND).sum(dim=-1))
    costs_BSC = (squares_BS1 + squares_B1C - 2 * (sources_BSD @ targets_BCD.transpose(1, 2))).clamp(min=0)
    if groups is not None:
        inverse_B1C, inverse_BS1 = split_halves(1 / groups.size_BM[:, prefix:].index_select(1, board_N))
        costs_BSC = costs_BSC / (inverse_BS1 + inverse_B1C)
    if attention_BT is not None:
        attention_B1C, attention_BS1 = split_halves(attention_BT[:, prefix:].index_select(1, board_N))
        costs_BSC = costs_BSC * (attention_BS1 + attention_B1C).sqrt()
    order_BS = costs_BSC.amin(dim=-1).topk(sources, dim=1, largest=False).indices

    image_B1 = torch.arange(batch, device=x_BTD.device)[:, None]
    joining_costs = costs_BSC.flatten(0, 1).index_select(0, (order_BS[:, :count] + image_B1 * sources).flatten())
    into_BR = joining_costs.argmin(dim=-1).view(batch, count)  # argmin over all sources takes as long as the product
    tokens_T = torch.cat([torch.arange(prefix, device=x_BTD.device), board_N + prefix])
    unmerged_A, source_S = tokens_T.split([tokens - sources, sources])  # A prefix tokens and targets
    source_BS = source_S.index_select(0, order_BS.flatten()).view_as(order_BS)
    stays_BM = torch.cat([unmerged_A.expand(batch, -1), source_BS[:, count:]], dim=1)
    before, after = image_B1 * tokens, image_B1 * (tokens - count)
    return Match(stays_BM + before, source_BS[:, :count] + before, into_BR + prefix + after)


def chessboard(grid: Pair) -> Tensor:
    """Return the patches (N,) in the order of a chessboard: first one colour, the targets, then the other, the sources.

    All neighbours of a source are targets. An odd number of patches has one more target than sources.
    """
    rows, columns = (torch.arange(side, device="cpu") for side in grid)
    return ((rows[:, None] + columns) % 2).flatten().argsort(stable=True)


class Groups(NamedTuple):
    """The groups of a sequence whose tokens were merged once or more."""

    size_BM: Tensor
    """Number of original tokens in each group."""
    matches: tuple[Match, ...]
    """The merges, in order."""

    @property
    def bias(self) -> Tensor:
        """log(size), to add to the attention logits (B, 1, 1, M): a shape that the fused kernel supports."""
        return self.size_BM.log()[:, None, None]

    def group_rows(self) -> Tensor:
        """Return the row (of B * M) of the group of each original token, (B, T)."""
        rows_BT, *later_rows = (_rows_after_merge(pairs) for pairs in self.matches)
        for rows in later_rows:
            rows_BT = rows.flatten().index_select(0, rows_BT.flatten()).view_as(rows_BT)
        return rows_BT


def merge(x_BTD: Tensor, groups: Groups | None, pairs: Match) -> tuple[Tensor, Groups]:
    """Merge matched tokens. Return the tokens (B, M, D), each the mean of its group, and the groups."""
    if groups is None:
        size_BT, matches = x_BTD.new_ones(x_BTD.shape[:2]), ()
    else:
        (size_BT, matches), x_BTD = groups, x_BTD * groups.size_BM[..., None]
    size_BM = _sum_pairs(size_BT, pairs)
    return _sum_pairs(x_BTD, pairs) / size_BM[..., None], Groups(size_BM, (*matches, pairs))


def spread(x_BMD: Tensor, groups: Groups | None) -> Tensor:
    """Undo merging: return every original token with the value of its group (B, T, D)."""
    if groups is None:
        return x_BMD
    rows_BT = groups.group_rows()
    return x_BMD.flatten(0, 1).index_select(0, rows_BT.flatten()).unflatten(0, rows_BT.shape)


def _sum_pairs(x: Tensor, pairs: Match) -> Tensor:
    """Add each joining token to its target: (B, T) to (B, M), or (B, T, D) to (B, M, D)."""
    rows = x.flatten(0, 1)
    stays, joins = (rows.index_select(0, index.flatten()) for index in (pairs.stays_BM, pairs.joins_BR))
    return stays.index_add(0, pairs.into_BR.flatten(), joins).unflatten(0, pairs.stays_BM.shape)


def _rows_after_merge(pairs: Match) -> Tensor:
    """Return the row after merging of each token before merging (B, T)."""
    after = torch.arange(pairs.stays_BM.numel(), device=pairs.stays_BM.device)
    tokens = pairs.stays_BM.shape[1] + pairs.joins_BR.shape[1]
    rows = after.new_zeros(pairs.stays_BM.shape[0] * tokens)
    rows = rows.scatter(0, pairs.stays_BM.flatten(), after)
    return rows.scatter(0, pairs.joins_BR.flatten(), pairs.into_BR.flatten()).view(-1, tokens)
