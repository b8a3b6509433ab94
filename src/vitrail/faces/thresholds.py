"""Thresholds for a demanded false-accept rate, from scores of people who are not the same."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.core.intervals import incomplete_beta
from vitrail.evaluation.verification_metrics import SUPPORT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """A threshold, and what is known of its errors. It is kept in a gallery."""

    far: float
    """The rate that was demanded."""
    threshold: float
    """Scores of at least this are accepted."""
    errors: int
    """How many of the `trials` it accepts, though none should be."""
    trials: int
    interval: tuple[float, float]
    """95 % interval (Clopper and Pearson) of the rate of errors."""
    people: int
    """How many people the trials come from."""
    data: str
    """Where they come from."""
    gallery_people: int | None = None
    """How many people are enrolled, on which the rate depends: of identification alone."""
    tar: float | None = None
    """Share of the genuine pairs of the same data that it accepts, if there are any: of verification alone."""

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """The calibration of a document; TypeError, KeyError or ValueError if it is none."""
        low, high = document["interval"]
        others: dict[str, Any] = {key: value for key, value in document.items() if key != "interval"}
        found = cls(**others, interval=(low, high))
        rates = (found.far, found.threshold, low, high, 0 if found.tar is None else found.tar)
        counts = (found.errors, found.trials, found.people, 0 if found.gallery_people is None else found.gallery_people)
        if (
            not all(type(rate) in (int, float) and -2 < rate < 2 for rate in rates)  # NaN is not, either
            or not all(type(count) is int and 0 <= count < 2**63 for count in counts)
            or type(found.data) is not str
        ):
            raise ValueError(document)
        return found


def clopper_pearson(errors: int, trials: int, level: float = 0.05) -> tuple[float, float]:
    """The exact interval of a proportion: ends beyond which so few errors, or so many, have a probability of less than
    half of `level`."""

    def quantile(share: float, a: float, b: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if incomplete_beta(a, b, middle) < share else (low, middle)
        return (low + high) / 2

    low = 0.0 if errors == 0 else quantile(level / 2, errors, trials - errors + 1)
    high = 1.0 if errors == trials else quantile(1 - level / 2, errors + 1, trials - errors)
    return low, high


def least_rate(trials: int) -> float:
    """The lowest rate that so many trials can support; more than 1 if they support none."""
    return SUPPORT / trials if trials else math.inf


def check_rate(far: float, trials: int, what: str, unit: str) -> None:
    """Refuse a rate that so many trials cannot support."""
    if not 0 < far < 1:
        raise UsageError(f"--far must be above 0 and below 1, got {far:g}.")
    least = least_rate(trials)
    if far * (1 + 1e-9) < least:
        can = f"at least {_rounded_up(least):g}" if least < 1 else "left out: no rate can be measured"
        raise UsageError(
            f"--far must be {can} for {what} with {trials:,} {unit} in DATA ({SUPPORT} errors or more are needed to"
            f" measure a rate), got {far:g}. Use more images of more people, or a higher rate."
        )


def _rounded_up(rate: float) -> float:
    """Two digits are enough, and never too few."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.ceil(rate / unit - 1e-9) * unit


def threshold_at(far: float, blocks: Iterable[np.ndarray], trials: int) -> tuple[float, int]:
    """The lowest threshold between two scores that accepts at most a share `far` of the `trials`, whose scores come in
    blocks; and how many it accepts. Only the highest scores are kept in memory."""
    most = min(math.floor(far * trials * (1 + 1e-12)), trials - 1)  # one is refused, or there is no lowest threshold
    top = np.empty(0, np.float64)
    for block in blocks:
        top = np.concatenate([top, block.astype(np.float64)])
        if len(top) > most + 1:
            top = np.partition(top, len(top) - most - 1)[-most - 1 :]  # the next below tells where to cut
    top = np.sort(top)[::-1]
    refused = top[most]
    accepted = top[top > refused]
    if not len(accepted):
        return float(np.nextafter(refused, np.inf)), 0
    return float((accepted[-1] + refused) / 2), len(accepted)
