"""Comparison of two models on the same images by the exact paired test (McNemar 1947, a sign test).

Images that both models predict correctly, or both incorrectly, do not tell which model is better. If the models are
equally good, each other image is equally likely to be correct for the first or for the second model, like a fair coin.
"""

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np

LEVEL = 0.05
"""Significance level. A p-value below it means that one model is better."""

Name = TypeVar("Name", bound=Hashable)


class PairedComparison(NamedTuple):
    """Counts of the correct predictions of two models for the same images."""

    only_first: int
    """Images that only the first model predicts correctly."""
    only_second: int
    """Images that only the second model predicts correctly."""
    both: int
    """Images that both models predict correctly."""
    count: int
    """All images."""

    @classmethod
    def of(cls, first_correct: np.ndarray, second_correct: np.ndarray) -> "PairedComparison":
        """Count images from arrays that hold whether each prediction of the first and the second model is correct."""
        both = int((first_correct & second_correct).sum())
        only_first, only_second = int(first_correct.sum()) - both, int(second_correct.sum()) - both
        return cls(only_first, only_second, both, len(first_correct))

    @property
    def accuracies(self) -> tuple[float, float]:
        """Accuracy of each model."""
        return (self.both + self.only_first) / self.count, (self.both + self.only_second) / self.count

    @property
    def p_value(self) -> float:
        """Probability that equally good models differ by chance at least this much, in either direction."""
        return sign_test(self.only_first, self.only_second)

    def verdict(self, first_name: str, second_name: str, level: float = LEVEL) -> str:
        """Return the name of the better model in a sentence, or "cannot tell"."""
        if self.p_value >= level:
            return "cannot tell"
        return f"{first_name if self.only_first > self.only_second else second_name} is better"

    def sentence(self, first_name: str, second_name: str, level: float = LEVEL) -> str:
        """Return the comparison in one line, with the names of the models."""
        first, second = (f"{100 * share:.1f} %" for share in self.accuracies)
        return (
            f"{first_name} {first}, {second_name} {second}: {self.verdict(first_name, second_name, level)},"
            f" {self.only_first:,} against {self.only_second:,} of {self.count:,}, {self.chance}"
        )

    @property
    def chance(self) -> str:
        """The p-value as text."""
        return "p < 0.001" if self.p_value < 0.001 else f"p = {self.p_value:.2g}"


def sign_test(heads: int, tails: int) -> float:
    """Return the two-sided p-value for `heads` and `tails` of a fair coin; 1 for no throws."""
    throws, fewer = heads + tails, min(heads, tails)
    if 2 * fewer == throws:
        return 1.0
    # The terms of the tail are summed relative to the largest. They decrease.
    log_largest = math.lgamma(throws + 1) - math.lgamma(fewer + 1) - math.lgamma(throws - fewer + 1)
    total = term = 1.0
    for count in range(fewer, 0, -1):
        term *= count / (throws - count + 1)
        total += term
        if term < 1e-17 * total:
            break
    return min(2 * total * math.exp(log_largest - throws * math.log(2)), 1.0)


def holm_levels(p_values: Mapping[Name, float], level: float = LEVEL) -> dict[Name, float]:
    """Return the significance level of each hypothesis, so that the family-wise error rate is `level` (Holm 1979).

    The smallest p-value has the strictest level. After the first p-value that is not below its level, the level stays.
    """
    levels: dict[Name, float] = {}
    current_level, is_constant = 0.0, False
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if not is_constant:
            current_level = level / (len(p_values) - rank)
            is_constant = not p_values[name] < current_level
        levels[name] = current_level
    return levels
