"""Token merging: similar patches become one token in front of a layer (the idea of arXiv 2210.09461).

Half of the patches are sources, the others targets, like the squares of a chessboard. The sources whose joining costs
least join a target: the token of a group is the mean of its patches, and its size, their number, enters attention as
log(size), so that the group gets the attention that as many equal tokens would get.

The cost is the sum of squared distances that a group gains (Ward's criterion), times the square root of the attention
that [CLS] pays to a patch like each of the two in the next layer: what the head reads is changed least. How many
patches a token already is counts in Ward's criterion, and not a second time in the attention.

Shapes: B images, T tokens of which the first are [CLS] and registers, S sources and C targets, R of the sources merged,
M = T - R tokens afterwards, D width. Indices count through the rows of a whole batch (B * T): selecting rows of one
matrix is three times as fast as gathering along a dimension.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.core.settings import Pair


class Match(NamedTuple):
    """Which tokens stay and which join another."""

    stays_BM: Tensor
    """The row, before merging, of each token afterwards."""
    joins_BR: Tensor
    """The row, before merging, of each token that joins another."""
    into_BR: Tensor
    """The row, afterwards, of the token that it joins."""


def match(
    x_BTD: Tensor,
    prefix: int,
    count: int,
    board_N: Tensor | None = None,
    groups: "Groups | None" = None,
    attention_BT: Tensor | None = None,
) -> Match:
    """Find the `count` sources whose joining costs least. [CLS] and registers, the `prefix`, never take part.
    Afterwards the targets follow the prefix, and then the sources that stay.

    `board_N` is the `chessboard` of all patches. Where some have been merged or dropped, every second token is a
    source. `groups` are those of earlier merges, and `attention_BT` is what [CLS] pays to each token, if it is what the
    head reads.
    """
    batch, tokens, _ = x_BTD.shape
    patches = tokens - prefix
    if board_N is None or len(board_N) != patches:
        places = torch.arange(patches, device=x_BTD.device)
        board_N = torch.cat([places[0::2], places[1::2]])
    sources = patches // 2

    def halves(values_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Of targets (B, 1, C), and of sources (B, S, 1)."""
        targets, others = values_BN.split([patches - sources, sources], dim=1)
        return targets[:, None], others[:, :, None]

    moved_BND = x_BTD[:, prefix:].index_select(1, board_N)
    moved_BND = moved_BND - moved_BND.mean(dim=1, keepdim=True)  # for the products' precision
    targets_BCD, sources_BSD = moved_BND.split([patches - sources, sources], dim=1)
    squares_B1C, squares_BS1 = halves((moved_BND * moved_BND).sum(dim=-1))
    costs_BSC = (squares_BS1 + squares_B1C - 2 * (sources_BSD @ targets_BCD.transpose(1, 2))).clamp(min=0)
    if groups is not None:
        share_B1C, share_BS1 = halves(1 / groups.size_BM[:, prefix:].index_select(1, board_N))
        costs_BSC = costs_BSC / (share_BS1 + share_B1C)
    if attention_BT is not None:
        seen_B1C, seen_BS1 = halves(attention_BT[:, prefix:].index_select(1, board_N))
        costs_BSC = costs_BSC * (seen_BS1 + seen_B1C).sqrt()
    order_BS = costs_BSC.amin(dim=-1).topk(sources, dim=1, largest=False).indices

    image_B1 = torch.arange(batch, device=x_BTD.device)[:, None]
    best = costs_BSC.flatten(0, 1).index_select(0, (order_BS[:, :count] + image_B1 * sources).flatten())
    into_BR = best.argmin(dim=-1).view(batch, count)  # of all sources it would take as long as the product
    places_T = torch.cat([torch.arange(prefix, device=x_BTD.device), board_N + prefix])
    always_T, source_S = places_T.split([tokens - sources, sources])
    place_BS = source_S.index_select(0, order_BS.flatten()).view_as(order_BS)
    stays_BM = torch.cat([always_T.expand(batch, -1), place_BS[:, count:]], dim=1)
    before, after = image_B1 * tokens, image_B1 * (tokens - count)
    return Match(stays_BM + before, place_BS[:, :count] + before, into_BR + prefix + after)


def chessboard(grid: Pair) -> Tensor:
    """The patches of one colour of a chessboard, which are targets, and then those of the other: all neighbours of a
    source are targets. If the number of patches is odd, one more is a target."""
    rows, columns = (torch.arange(side, device="cpu") for side in grid)
    return ((rows[:, None] + columns) % 2).flatten().argsort(stable=True)


class Groups(NamedTuple):
    """The tokens of a sequence that has been merged, once or more."""

    size_BM: Tensor
    """How many of the original tokens each one is."""
    matches: tuple[Match, ...]
    """Each merge, in order."""

    @property
    def bias(self) -> Tensor:
        """log(size), to add to the logits of attention (B, 1, 1, M): a form with which the fused kernel stays on."""
        return self.size_BM.log()[:, None, None]

    def home(self) -> Tensor:
        """The row of (B * M) that each original token belongs to, (B, T)."""
        first, *others = (_moves(found) for found in self.matches)
        home = first
        for moves in others:
            home = moves.flatten().index_select(0, home.flatten()).view_as(home)
        return home


def merge(x_BTD: Tensor, groups: Groups | None, found: Match) -> tuple[Tensor, Groups]:
    """The tokens (B, M, D) after a match, each the mean of its group, and the groups."""
    if groups is None:
        size_BT, matches = x_BTD.new_ones(x_BTD.shape[:2]), ()
    else:
        (size_BT, matches), x_BTD = groups, x_BTD * groups.size_BM[..., None]
    size_BM = _add(size_BT, found)
    return _add(x_BTD, found) / size_BM[..., None], Groups(size_BM, (*matches, found))


def spread(x_BMD: Tensor, groups: Groups | None) -> Tensor:
    """Every original token with the value of the token that it belongs to (B, T, D)."""
    if groups is None:
        return x_BMD
    home_BT = groups.home()
    return x_BMD.flatten(0, 1).index_select(0, home_BT.flatten()).unflatten(0, home_BT.shape)


def _add(x: Tensor, found: Match) -> Tensor:
    """What stays, plus what joins it: (B, M) of (B, T), or (B, M, D) of (B, T, D)."""
    rows = x.flatten(0, 1)
    stays, joins = (rows.index_select(0, index.flatten()) for index in (found.stays_BM, found.joins_BR))
    return stays.index_add(0, found.into_BR.flatten(), joins).unflatten(0, found.stays_BM.shape)


def _moves(found: Match) -> Tensor:
    """The row, afterwards, of each token before a match (B, T)."""
    after = torch.arange(found.stays_BM.numel(), device=found.stays_BM.device)
    tokens = found.stays_BM.shape[1] + found.joins_BR.shape[1]
    moves = after.new_zeros(found.stays_BM.shape[0] * tokens)
    moves = moves.scatter(0, found.stays_BM.flatten(), after)
    return moves.scatter(0, found.joins_BR.flatten(), found.into_BR.flatten()).view(-1, tokens)
