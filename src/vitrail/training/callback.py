"""The user's own function in the training loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.models.base import AnyModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a callback sees after every step."""

    step: int
    """Number of steps done, from 1."""
    total: int
    """Number of steps of the whole run."""
    epoch: int
    """The epoch of this step, from 0."""
    loss: float
    """Mean loss over the images of this step; NaN if the step was left out because it was not finite."""
    learning_rate: float
    """Learning rate of this step."""
    model: AnyModel = dataclasses.field(repr=False)
    """The model that is trained, not a copy, in evaluation mode. What a callback changes in it stays changed."""
    held_out: dict[str, Any] | None = None
    """The latest evaluation on the held-out images (`loss`, `accuracy`, `count`); None before the first."""


Callback = Callable[[Step], object]
"""Called after every step. It may return True to end the run; None and False go on."""


def asks_to_stop(answer: object) -> bool:
    """Whether this answer of a callback ends the run. Anything but a truth value is refused: it would be a guess."""
    if answer is None or isinstance(answer, bool | np.bool_):
        return bool(answer)
    raise UsageError(f"Callback must return True to end the run, or None or False to go on, got {answer!r}.")
