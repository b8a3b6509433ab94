"""Random numbers as a pure function of counters, without a generator or state.

`uniform(seed, epoch, index, stream="flip")` is always the same number, in any process and in any order of calls.
Arrays of counters broadcast: a batch costs one call.
"""

import zlib
from typing import NamedTuple

import numpy as np

Counter = int | np.ndarray

# SplitMix64 (Steele, Lea, Flood 2014): add a constant, then mix, so that every input bit changes every output bit.
_STEP, _FIRST_FACTOR, _SECOND_FACTOR = (
    np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def bits(*counters: Counter, stream: str) -> np.ndarray:
    """Return 64 random bits for each combination of counters. Different names of `stream` give independent numbers."""
    state = np.array([zlib.crc32(stream.encode())], np.uint64)
    for counter in counters:
        state = _mix_bits(state * _STEP + np.asarray(counter).astype(np.uint64))
    return _mix_bits(state)


def uniform(*counters: Counter, stream: str) -> np.ndarray:
    """Return floats in [0, 1) with 53 random bits."""
    return (bits(*counters, stream=stream) >> np.uint64(11)) * 2.0**-53


def integers(high: Counter, *counters: Counter, stream: str) -> np.ndarray:
    """Return integers in [0, high), where high is at most 2^32; the bias is below 2^-21."""
    return np.minimum(uniform(*counters, stream=stream) * high, np.asarray(high) - 1).astype(np.int64)


def beta(alpha: float, *counters: Counter, stream: str) -> np.ndarray:
    """Return samples of Beta(alpha, alpha), 0 < alpha <= 1, by Jöhnk's rejection method (accepts at least half)."""
    samples = None
    for attempt in range(64):
        first, second = (uniform(*counters, attempt, stream=stream + side) ** (1 / alpha) for side in "ab")
        total = first + second
        is_accepted = (total <= 1) & (total > 0)
        candidates = np.divide(first, total, out=np.full(total.shape, np.nan), where=is_accepted)
        samples = candidates if samples is None else np.where(np.isnan(samples), candidates, samples)
        if not np.isnan(samples).any():
            break
    return np.nan_to_num(samples, nan=0.5)


def permutation(count: int, *counters: int, stream: str) -> np.ndarray:
    """Return the integers 0 ... count - 1 in a random order."""
    return np.argsort(bits(*counters, np.arange(count), stream=stream), kind="stable")


class Stream(NamedTuple):
    """Random numbers for a batch of samples of an epoch. Different names give independent numbers for a sample."""

    seed: int
    epoch: int
    index: np.ndarray
    """Indices of the samples in the data (B)."""

    def uniform(self, name: str) -> np.ndarray:
        """Return a float in [0, 1) for each sample (B)."""
        return uniform(self.seed, self.epoch, self.index, stream=name)

    def uniforms(self, count: int, name: str) -> np.ndarray:
        """Return `count` floats in [0, 1) for each sample (B, count)."""
        return uniform(self.seed, self.epoch, self.index[:, None], np.arange(count), stream=name)

    def integers(self, high: Counter, name: str) -> np.ndarray:
        """Return an integer in [0, high) for each sample (B)."""
        return integers(high, self.seed, self.epoch, self.index, stream=name)

    def beta(self, alpha: float, name: str) -> np.ndarray:
        """Return a number from Beta(alpha, alpha) for each sample (B)."""
        return beta(alpha, self.seed, self.epoch, self.index, stream=name)

    def take(self, positions: np.ndarray) -> "Stream":
        """Return the stream of a part of the samples, given by positions or a mask."""
        return self._replace(index=self.index[positions])


def _mix_bits(state: np.ndarray) -> np.ndarray:
    state = state + _STEP
    state = (state ^ (state >> np.uint64(30))) * _FIRST_FACTOR
    state = (state ^ (state >> np.uint64(27))) * _SECOND_FACTOR
    return state ^ (state >> np.uint64(31))
