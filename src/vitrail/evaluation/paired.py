"""Two models on the same images: the exact paired test of their right answers (McNemar 1947; a sign test).

Images that both models answer rightly, or both wrongly, say nothing about which is better. If neither is, each of the
others is as likely right by one model as by the other: a fair coin.
"""

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

LEVEL = 0.05
"""Below it, a difference is called one."""

Name = TypeVar("Name", bound=Hashable)


class PairedComparison(NamedTuple):
    """Right answers of two models to the same images."""

    one: int
    """Images that only the first model answers rightly."""
    other: int
    """Images that only the second model answers rightly."""
    both: int
    """Images that both answer rightly."""
    count: int
    """All images."""

    @classmethod
    def of(cls, one: np.ndarray, other: np.ndarray) -> "PairedComparison":
        """From whether each model's answer to each image is right."""
        both = int((one & other).sum())
        return cls(int(one.sum()) - both, int(other.sum()) - both, both, len(one))

    @property
    def accuracies(self) -> tuple[float, float]:
        """The share of right answers of each model."""
        return (self.both + self.one) / self.count, (self.both + self.other) / self.count

    @property
    def p_value(self) -> float:
        """How often models that are equally good would differ at least as much by chance, in either direction."""
        return sign_test(self.one, self.other)

    def verdict(self, one: str, other: str, level: float = LEVEL) -> str:
        """Which model is better, by its name, or that this cannot be told."""
        if self.p_value >= level:
            return "cannot tell"
        return f"{one if self.one > self.other else other} is better"

    def sentence(self, one: str, other: str, level: float = LEVEL) -> str:
        """The comparison in one line, with the names of the models."""
        first, second = (f"{100 * share:.1f} %" for share in self.accuracies)
        return (
            f"{one} {first}, {other} {second}: {self.verdict(one, other, level)}, {self.one:,} against {self.other:,}"
            f" of {self.count:,}, {self.chance}"
        )

    @property
    def chance(self) -> str:
        """The p-value in words."""
        return "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.2g}"


def sign_test(one: int, other: int) -> float:
    """Two-sided p-value of a fair coin that fell `one` times on one side and `other` times on the other; 1 if it was
    never thrown."""
    thrown, fewer = one + other, min(one, other)
    if 2 * fewer == thrown:
        return 1.0
    # The largest term of the tail, and the others relative to it: each is smaller than the one before.
    largest = math.lgamma(thrown + 1) - math.lgamma(fewer + 1) - math.lgamma(thrown - fewer + 1)
    total = term = 1.0
    for heads in range(fewer, 0, -1):
        term *= heads / (thrown - heads + 1)
        total += term
        if term < 1e-17 * total:
            break
    return min(2 * total * math.exp(largest - thrown * math.log(2)), 1.0)


def holm_levels(p_values: Mapping[Name, float], level: float = LEVEL) -> dict[Name, float]:
    """The level at which each of several hypotheses is to be judged, so that all together err with `level` (Holm 1979).

    The smallest p-value is judged most strictly; from the first that is not below its level on, that level stays.
    """
    levels: dict[Name, float] = {}
    current, stopped = 0.0, False
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if not stopped:
            current = level / (len(p_values) - rank)
            stopped = not p_values[name] < current
        levels[name] = current
    return levels
