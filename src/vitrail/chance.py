"""Chance as a pure function of counters: no generator, no state, nothing that depends on what ran before.

`uniform(seed, epoch, index, stream="flip")` is the same number for ever, in any process and in any order of calls.
Arrays of counters broadcast: a batch costs one call.
"""

import zlib
from typing import NamedTuple

import numpy as np

Counter = int | np.ndarray

# SplitMix64 (Steele, Lea, Flood 2014): a step, then a mix in which every bit of the input reaches every output bit.
_STEP, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bits(*counters: Counter, stream: str) -> np.ndarray:
    """64 random bits for each combination of counters; `stream` names the purpose, so that purposes are independent."""
    state = np.array([zlib.crc32(stream.encode())], np.uint64)
    for counter in counters:
        state = _mix(state * _STEP + np.asarray(counter).astype(np.uint64))
    return _mix(state)


def uniform(*counters: Counter, stream: str) -> np.ndarray:
    """Real numbers in [0, 1), all 53 bits of them random."""
    return (bits(*counters, stream=stream) >> np.uint64(11)) * 2.0**-53


def integers(high: Counter, *counters: Counter, stream: str) -> np.ndarray:
    """Integers from 0 to below `high` (up to 2^32; the bias is below 2^-21)."""
    return np.minimum(uniform(*counters, stream=stream) * high, np.asarray(high) - 1).astype(np.int64)


def beta(alpha: float, *counters: Counter, stream: str) -> np.ndarray:
    """Shares from the distribution Beta(alpha, alpha), 0 < alpha <= 1, by Jöhnk's rejection (half or more pass)."""
    share = None
    for attempt in range(64):
        one, other = (uniform(*counters, attempt, stream=stream + side) ** (1 / alpha) for side in "ab")
        total = one + other
        fits = (total <= 1) & (total > 0)
        found = np.divide(one, total, out=np.full(total.shape, np.nan), where=fits)
        share = found if share is None else np.where(np.isnan(share), found, share)
        if not np.isnan(share).any():
            break
    return np.nan_to_num(share, nan=0.5)


def permutation(count: int, *counters: int, stream: str) -> np.ndarray:
    """The numbers 0 ... count - 1 in a random order."""
    return np.argsort(bits(*counters, np.arange(count), stream=stream), kind="stable")


class Stream(NamedTuple):
    """The random numbers of some samples in an epoch. A name tells independent numbers of one sample apart."""

    seed: int
    epoch: int
    index: np.ndarray
    """Which samples of the data these are (B)."""

    def uniform(self, name: str) -> np.ndarray:
        """A real number in [0, 1) for each sample."""
        return uniform(self.seed, self.epoch, self.index, stream=name)

    def uniforms(self, count: int, name: str) -> np.ndarray:
        """So many real numbers in [0, 1) for each sample (B, count)."""
        return uniform(self.seed, self.epoch, self.index[:, None], np.arange(count), stream=name)

    def integers(self, high: Counter, name: str) -> np.ndarray:
        """An integer from 0 to below `high` for each sample."""
        return integers(high, self.seed, self.epoch, self.index, stream=name)

    def beta(self, alpha: float, name: str) -> np.ndarray:
        """A share from Beta(alpha, alpha) for each sample."""
        return beta(alpha, self.seed, self.epoch, self.index, stream=name)

    def take(self, chosen: np.ndarray) -> "Stream":
        """The numbers of some of these samples."""
        return self._replace(index=self.index[chosen])


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + _STEP
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
