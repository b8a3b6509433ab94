"""The callback: a user function that the training loop calls after every step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.models.base import AnyModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """State of the training after a step, passed to the callback."""

    step: int
    """Number of steps done, from 1."""
    total: int
    """Number of steps of the whole run."""
    epoch: int
    """The epoch of this step, from 0."""
    loss: float
    """Mean loss over the images of this step; NaN if the step was skipped as not finite."""
    learning_rate: float
    """Learning rate of this step."""
    model: AnyModel = dataclasses.field(repr=False)
    """The model being trained, in evaluation mode. It is not a copy: changes that the callback makes to it persist."""
    held_out: dict[str, Any] | None = None
    """The latest evaluation on the held-out images (`loss`, `accuracy`, `count`); None before the first."""


Callback = Callable[[Step], object]
"""Function called after every step. Returning True ends the run; None and False continue it."""


def is_stop_request(value: object) -> bool:
    """Return whether the return value of a callback ends the run. Raise UsageError unless it is a boolean or None."""
    if value is None or isinstance(value, bool | np.bool_):
        return bool(value)
    raise UsageError(f"Callback must return True to end the run, or None or False to continue, got {value!r}.")
