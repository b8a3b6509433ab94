"""Random numbers as a pure function of counters: no generator, no state, independent of what ran before.

`uniform(seed, epoch, index, stream="flip")` is always the same number, in any process and in any order of calls.
Arrays of counters broadcast: a batch costs one call.
"""

import zlib
from typing import NamedTuple

import numpy as np

Counter = int | np.ndarray

# SplitMix64 (Steele, Lea, Flood 2014): a step, then a mix in which every bit of the input reaches every output bit.
_STEP, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def bits(*counters: Counter, stream: str) -> np.ndarray:
    """64 random bits for each combination of counters. Different names of `stream` give independent numbers."""
    state = np.array([zlib.crc32(stream.encode())], np.uint64)
    for counter in counters:
        state = _mix(state * _STEP + np.asarray(counter).astype(np.uint64))
    return _mix(state)


def uniform(*counters: Counter, stream: str) -> np.ndarray:
    """Floats in [0, 1) with 53 random bits."""
    return (bits(*counters, stream=stream) >> np.uint64(11)) * 2.0**-53


def integers(high: Counter, *counters: Counter, stream: str) -> np.ndarray:
    """Integers in [0, high), where high is at most 2^32; the bias is below 2^-21."""
    return np.minimum(uniform(*counters, stream=stream) * high, np.asarray(high) - 1).astype(np.int64)


def beta(alpha: float, *counters: Counter, stream: str) -> np.ndarray:
    """Samples of Beta(alpha, alpha), 0 < alpha <= 1, by Jöhnk's rejection method (at least half are accepted)."""
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
    """Random numbers for some samples of an epoch. Different names give independent numbers for the same sample."""

    seed: int
    epoch: int
    index: np.ndarray
    """Indices of the samples in the data (B)."""

    def uniform(self, name: str) -> np.ndarray:
        """A float in [0, 1) for each sample."""
        return uniform(self.seed, self.epoch, self.index, stream=name)

    def uniforms(self, count: int, name: str) -> np.ndarray:
        """`count` floats in [0, 1) for each sample (B, count)."""
        return uniform(self.seed, self.epoch, self.index[:, None], np.arange(count), stream=name)

    def integers(self, high: Counter, name: str) -> np.ndarray:
        """An integer in [0, high) for each sample."""
        return integers(high, self.seed, self.epoch, self.index, stream=name)

    def beta(self, alpha: float, name: str) -> np.ndarray:
        """A sample of Beta(alpha, alpha) for each sample."""
        return beta(alpha, self.seed, self.epoch, self.index, stream=name)

    def take(self, chosen: np.ndarray) -> "Stream":
        """The stream of some of these samples."""
        return self._replace(index=self.index[chosen])


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + _STEP
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
