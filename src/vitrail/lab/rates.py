"""The choice of learning rates.

Every variant of a model gets a learning rate of its own at every number of training images. It is chosen by the mean
accuracy on validation images under three seeds that take no part in verdicts. Rates whose difference is within one
standard error are a tie. Variants that are compared share the rate that is best for their mean if it is a tie for them.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from vitrail.lab.statistics import difference
from vitrail.lab.training import FIRST_RATES
from vitrail.lab.trial import Trial


def rate_trial(variant: Trial, rate: float, seed: int) -> Trial:
    """Return the trial that trains a variant with a learning rate and a seed of the choice.

    All permutations of a level share one rate, so the seed also draws the permutation.
    """
    changes = {}
    if variant.settings.get("permutation"):
        changes["permutation"] = [*variant.settings["permutation"][:2], seed]
    return variant.clone_with(learning_rate=rate, seed=seed, **changes)


class RateChoice:
    """The rates that were tried for a variant, with their correctness on validation images (seeds, images)."""

    def __init__(self, correctness: dict[float, np.ndarray]) -> None:
        self._correctness = correctness

    @functools.cached_property
    def means(self) -> dict[float, float]:
        """Mean accuracy of each rate."""
        return {rate: float(right.mean()) for rate, right in self._correctness.items()}

    @functools.cached_property
    def best(self) -> float:
        """The rate with the highest mean accuracy; of equal ones, that nearest to the middle of the rates."""
        middle = math.log(FIRST_RATES[len(FIRST_RATES) // 2])
        return max(self.means, key=lambda rate: (self.means[rate], -abs(math.log(rate) - middle)))

    def within(self, errors: float) -> list[float]:
        """Return the rates whose mean is at most `errors` standard errors below that of the best rate."""
        best = self._correctness[self.best]
        lags = {rate: difference(best, right) for rate, right in self._correctness.items()}
        return [rate for rate, lag in lags.items() if rate == self.best or lag.value <= errors * lag.error]


def choose_rate(own: RateChoice, others: Sequence[RateChoice]) -> float:
    """Return the rate of a variant that is compared with others."""
    choices = (own, *others)
    shared_rates = [rate for rate in own.means if all(rate in choice.means for choice in others)]
    shared = max(shared_rates, key=lambda rate: sum(choice.means[rate] for choice in choices))
    return shared if shared in own.within(1) else own.best
