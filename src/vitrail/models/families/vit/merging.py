"""Token merging: similar patches become one token in front of a layer (the idea of arXiv 2210.09461).

Half of the patches are sources, the others are targets, like the squares of a chessboard. The cheapest sources each
join a target and form a group. A group is one token, the mean of its patches. Its size (the number of its patches)
enters attention as log(size): the group gets the attention that as many equal tokens would get.

The cost of a pair is the sum of squared distances that the group gains (Ward's criterion), times the square root of the
attention that [CLS] pays to the two tokens in the next layer: patches that the head does not read are merged first. The
sizes of the two tokens count in Ward's criterion only, not in the attention.

Shapes: B images, T tokens (first [CLS] and registers), S sources and C targets, R merged sources, M = T - R tokens
after merging, D width. Indices count through the rows of a whole batch (B * T): selecting rows of one matrix is three
times as fast as gathering along a dimension.
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
    """Merge as many patches as `config.merge` says in front of `layer`: the tokens (B, M, D) and their groups.

    `cls_attention` computes the attention of [CLS] to each token in this layer (B, T).
    """
    count = config.merged(layer, z_BTD.shape[1] - config.prefix)
    if not count:
        return z_BTD, groups
    attention_BT = cls_attention(z_BTD) if config.pool == "cls" else None
    return merge(z_BTD, groups, match(z_BTD, config.prefix, count, board_N, groups, attention_BT))


class Match(NamedTuple):
    """Which tokens stay and which join another one."""

    stays_BM: Tensor
    """For each token after merging, its row before."""
    joins_BR: Tensor
    """For each token that joins another one, its row before merging."""
    into_BR: Tensor
    """For each token that joins another one, the row of that one after merging."""


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
        places = torch.arange(patches, device=x_BTD.device)
        board_N = torch.cat([places[0::2], places[1::2]])
    sources = patches // 2

    def halves(values_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Split values of patches into those of targets (B, 1, C) and of sources (B, S, 1)."""
        of_targets, of_sources = values_BN.split([patches - sources, sources], dim=1)
        return of_targets[:, None], of_sources[:, :, None]

    centred_BND = x_BTD[:, prefix:].index_select(1, board_N)
    centred_BND = centred_BND - centred_BND.mean(dim=1, keepdim=True)  # products of centred vectors lose fewer digits
    targets_BCD, sources_BSD = centred_BND.split([patches - sources, sources], dim=1)
    squares_B1C, squares_BS1 = halves((centred_BND * centred_BND).sum(dim=-1))
    costs_BSC = (squares_BS1 + squares_B1C - 2 * (sources_BSD @ targets_BCD.transpose(1, 2))).clamp(min=0)
    if groups is not None:
        share_B1C, share_BS1 = halves(1 / groups.size_BM[:, prefix:].index_select(1, board_N))
        costs_BSC = costs_BSC / (share_BS1 + share_B1C)
    if attention_BT is not None:
        read_B1C, read_BS1 = halves(attention_BT[:, prefix:].index_select(1, board_N))
        costs_BSC = costs_BSC * (read_BS1 + read_B1C).sqrt()
    order_BS = costs_BSC.amin(dim=-1).topk(sources, dim=1, largest=False).indices

    image_B1 = torch.arange(batch, device=x_BTD.device)[:, None]
    best = costs_BSC.flatten(0, 1).index_select(0, (order_BS[:, :count] + image_B1 * sources).flatten())
    into_BR = best.argmin(dim=-1).view(batch, count)  # for all sources, argmin would take as long as the product
    places_T = torch.cat([torch.arange(prefix, device=x_BTD.device), board_N + prefix])
    always_A, source_S = places_T.split([tokens - sources, sources])
    place_BS = source_S.index_select(0, order_BS.flatten()).view_as(order_BS)
    stays_BM = torch.cat([always_A.expand(batch, -1), place_BS[:, count:]], dim=1)
    before, after = image_B1 * tokens, image_B1 * (tokens - count)
    return Match(stays_BM + before, place_BS[:, :count] + before, into_BR + prefix + after)


def chessboard(grid: Pair) -> Tensor:
    """Order of the patches (N,): first the targets, on one colour of a chessboard, then the sources, on the other.

    All neighbours of a source are targets. If the number of patches is odd, there is one target more.
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

    def home(self) -> Tensor:
        """The row (of B * M) of each original token's group, (B, T)."""
        home_BT, *later_moves = (_moves(pairs) for pairs in self.matches)
        for moves in later_moves:
            home_BT = moves.flatten().index_select(0, home_BT.flatten()).view_as(home_BT)
        return home_BT


def merge(x_BTD: Tensor, groups: Groups | None, pairs: Match) -> tuple[Tensor, Groups]:
    """Merge matched tokens: the tokens (B, M, D), each the mean of its group, and the groups."""
    if groups is None:
        size_BT, matches = x_BTD.new_ones(x_BTD.shape[:2]), ()
    else:
        (size_BT, matches), x_BTD = groups, x_BTD * groups.size_BM[..., None]
    size_BM = _sum_pairs(size_BT, pairs)
    return _sum_pairs(x_BTD, pairs) / size_BM[..., None], Groups(size_BM, (*matches, pairs))


def spread(x_BMD: Tensor, groups: Groups | None) -> Tensor:
    """Undo merging: every original token with the value of its group (B, T, D)."""
    if groups is None:
        return x_BMD
    home_BT = groups.home()
    return x_BMD.flatten(0, 1).index_select(0, home_BT.flatten()).unflatten(0, home_BT.shape)


def _sum_pairs(x: Tensor, pairs: Match) -> Tensor:
    """Add each joining token to the one that it joins: (B, T) to (B, M), or (B, T, D) to (B, M, D)."""
    rows = x.flatten(0, 1)
    stays, joins = (rows.index_select(0, index.flatten()) for index in (pairs.stays_BM, pairs.joins_BR))
    return stays.index_add(0, pairs.into_BR.flatten(), joins).unflatten(0, pairs.stays_BM.shape)


def _moves(pairs: Match) -> Tensor:
    """The row after merging of each token before it (B, T)."""
    after = torch.arange(pairs.stays_BM.numel(), device=pairs.stays_BM.device)
    tokens = pairs.stays_BM.shape[1] + pairs.joins_BR.shape[1]
    moves = after.new_zeros(pairs.stays_BM.shape[0] * tokens)
    moves = moves.scatter(0, pairs.stays_BM.flatten(), after)
    return moves.scatter(0, pairs.joins_BR.flatten(), pairs.into_BR.flatten()).view(-1, tokens)
