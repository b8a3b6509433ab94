"""The parts of sparse attention and their sizes, without torch: `vitrail info` counts with them.

Patches are divided into groups whose queries have the same keys, so that only scores inside groups are computed. Local
attention has one part, tiles of the grid with a window of keys around each. Strided attention has two: neighbours in
raster order, and patches of equal remainder modulo the stride. `attention_mask.py` computes the indices,
`models/sparse_attention.py` the attention.
"""

import functools
from typing import NamedTuple

from vitrail.core.settings import Pair

# A key that is copied into a group takes as long as this many scores. Measured with one thread on AVX-512, forward and
# backward, as the times of tiles from 2 x 4 to 8 x 8.
_SCORES_PER_KEY = 20
_MAX_BLOCK = 32
_DENSE_TOKENS = 128  # shorter sequences are faster with a mask
_DENSE_SHARE = 0.9


class Axis(NamedTuple):
    """One axis of the grid, divided into blocks of queries, each with a window of keys."""

    side: int
    """Number of patches."""
    radius: int
    """Largest distance of a key from its query."""
    block: int
    """Queries in a block. The last block repeats its last query if the side is not a multiple."""
    wraps: bool = False
    """Whether distances are measured around the edges."""

    @property
    def starts(self) -> range:
        """The first query of each block."""
        return range(0, self.side, self.block)

    @property
    def window(self) -> int:
        """Number of keys of a block: the most that any block needs."""
        if self.wraps:
            return min(self.block + 2 * self.radius, self.side)
        return max(
            min(start + self.block + self.radius, self.side) - max(start - self.radius, 0) for start in self.starts
        )

    def first_key(self, start: int) -> int:
        """The first key of the block that begins at `start`."""
        if self.wraps:
            return (start - self.radius) % self.side
        return min(max(start - self.radius, 0), self.side - self.window)


class Tiles(NamedTuple):
    """Tiles of the grid: the queries of a tile have the keys of one window, and the prefix tokens as further keys."""

    rows: Axis
    columns: Axis
    prefix: int

    @property
    def groups(self) -> int:
        return len(self.rows.starts) * len(self.columns.starts)

    @property
    def queries(self) -> int:
        return self.rows.block * self.columns.block

    @property
    def keys(self) -> int:
        return self.prefix + self.rows.window * self.columns.window


class Residues(NamedTuple):
    """Patches whose indices have the same remainder modulo the stride."""

    patches: int
    groups: int
    """The stride."""

    @property
    def queries(self) -> int:
        return -(-self.patches // self.groups)

    keys = queries


Part = Tiles | Residues


def count_scores(part: Part) -> int:
    """Return the number of scores that are computed, with those that are masked."""
    return part.groups * part.queries * part.keys


@functools.lru_cache(maxsize=256)
def local_parts(grid: Pair, radius: int, wraps: bool, prefix: int) -> tuple[Part, ...]:
    """Return the part of local attention, with the fastest tiles; empty if a mask is faster."""
    tiles = _fastest_tiles(grid, (radius, radius), wraps, prefix)
    return _unless_dense((tiles,), grid[0] * grid[1] + prefix)


@functools.lru_cache(maxsize=256)
def strided_parts(patches: int, stride: int, prefix: int) -> tuple[Part, ...]:
    """Return the two parts of strided attention; empty if a mask is faster, as for strides above half of the patches,
    with which a remainder may have a single patch."""
    if 2 * stride > patches:
        return ()
    neighbours = _fastest_tiles((1, patches), (0, stride - 1), False, prefix)
    return _unless_dense((neighbours, Residues(patches, stride)), patches + prefix)


def _fastest_tiles(grid: Pair, radii: Pair, wraps: bool, prefix: int) -> Tiles:
    axes = (
        [Axis(side, radius, block, wraps) for block in range(1, min(side, _MAX_BLOCK) + 1)]
        for side, radius in zip(grid, radii, strict=True)
    )
    rows, columns = ([(axis, len(axis.starts), axis.window) for axis in options] for options in axes)

    def time(row: tuple[Axis, int, int], column: tuple[Axis, int, int]) -> int:
        keys = prefix + row[2] * column[2]
        return row[1] * column[1] * keys * (row[0].block * column[0].block + _SCORES_PER_KEY)

    row, column = min(((row, column) for row in rows for column in columns), key=lambda pair: time(*pair))
    return Tiles(row[0], column[0], prefix)


def _unless_dense(parts: tuple[Part, ...], tokens: int) -> tuple[Part, ...]:
    """Return the parts, or none if masking all scores is faster. Two parts take twice as long as one with as many
    scores, because their softmaxes are joined."""
    time = len(parts) * sum(count_scores(part) + _SCORES_PER_KEY * part.groups * part.keys for part in parts)
    return parts if tokens > _DENSE_TOKENS and time < _DENSE_SHARE * tokens**2 else ()
