"""Thresholds for a requested false-accept rate (FAR), calibrated on scores of impostors."""

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
    """A calibrated threshold and its measured error rate, as stored in a gallery."""

    far: float
    """The requested false-accept rate."""
    threshold: float
    """Lowest score that is accepted."""
    errors: int
    """Number of false accepts among the `trials`."""
    trials: int
    """Number of impostor pairs (`verify`), or of images of people who are not enrolled (`identify`)."""
    interval: tuple[float, float]
    """95 % Clopper-Pearson interval of the false-accept rate."""
    people: int
    """Number of people in the calibration data."""
    data: str
    """Path or name of the calibration data."""
    gallery_people: int | None = None
    """Number of enrolled people, on which the rate of `identify` depends; None for `verify`."""
    tar: float | None = None
    """True-accept rate on the genuine pairs of the same data; None for `identify` and without genuine pairs."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document that `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        """Return the calibration in a JSON document. Raises TypeError, KeyError or ValueError if it is not valid."""
        low, high = document["interval"]
        fields: dict[str, Any] = {key: value for key, value in document.items() if key != "interval"}
        calibration = cls(**fields, interval=(low, high))
        rates = (calibration.far, calibration.threshold, low, high, 0 if calibration.tar is None else calibration.tar)
        counts = (
            calibration.errors,
            calibration.trials,
            calibration.people,
            0 if calibration.gallery_people is None else calibration.gallery_people,
        )
        if (
            not all(type(rate) in (int, float) and -2 < rate < 2 for rate in rates)  # False for NaN
            or not all(type(count) is int and 0 <= count < 2**63 for count in counts)
            or type(calibration.data) is not str
        ):
            raise ValueError(document)
        return calibration


def clopper_pearson(errors: int, trials: int, level: float = 0.05) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) confidence interval of a proportion, with coverage of at least 1 - `level`."""

    def quantile(share: float, a: float, b: float) -> float:
        """Return the quantile of the beta distribution, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if incomplete_beta(a, b, middle) < share else (low, middle)
        return (low + high) / 2

    low = 0.0 if errors == 0 else quantile(level / 2, errors, trials - errors + 1)
    high = 1.0 if errors == trials else quantile(1 - level / 2, errors + 1, trials - errors)
    return low, high


def least_rate(trials: int) -> float:
    """Return the lowest error rate that can be measured with a number of trials; above 1 if none can be."""
    return SUPPORT / trials if trials else math.inf


def check_rate(far: float, trials: int, task: str, unit: str) -> None:
    """Raise UsageError if `trials` are too few to calibrate a threshold for a false-accept rate. `unit` names them."""
    if not 0 < far < 1:
        raise UsageError(f"--far must be above 0 and below 1, got {far:g}.")
    least = least_rate(trials)
    if far * (1 + 1e-9) < least:
        rule = f"at least {_round_up_to_two_digits(least):g}" if least < 1 else "left out: no rate can be measured"
        raise UsageError(
            f"--far must be {rule} for {task} with {trials:,} {unit} in DATA ({SUPPORT} errors or more are needed to"
            f" measure a rate), got {far:g}. Use more images of more people, or a higher rate."
        )


def _round_up_to_two_digits(rate: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return math.ceil(rate / unit - 1e-9) * unit


def threshold_at(far: float, blocks: Iterable[np.ndarray], trials: int) -> tuple[float, int]:
    """Return the lowest threshold that accepts at most a share `far` of impostor scores, and how many it accepts.

    `trials` is the number of scores in all blocks. The threshold lies between two scores. Only the highest scores are
    kept in memory.
    """
    # At least one score must be rejected: if all are accepted, every lower threshold accepts them, too.
    max_accepted = min(math.floor(far * trials * (1 + 1e-12)), trials - 1)
    top = np.empty(0, np.float64)
    for block in blocks:
        top = np.concatenate([top, block.astype(np.float64)])
        if len(top) > max_accepted + 1:  # also keep the highest rejected score: the threshold lies above it
            top = np.partition(top, len(top) - max_accepted - 1)[-max_accepted - 1 :]
    top = np.sort(top)[::-1]
    rejected = top[max_accepted]
    accepted = top[top > rejected]
    if not len(accepted):
        return float(np.nextafter(rejected, np.inf)), 0
    return float((accepted[-1] + rejected) / 2), len(accepted)
