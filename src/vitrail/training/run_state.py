"""The fields of a checkpoint's `state.json`. Its checksum shows damage; the values are our own.

step total seconds losses                   progress; the losses of the last steps, null for skipped ones
best latest start                           the best evaluation, the latest one, and the one before the first step
damaged left_out                            damaged images, skipped steps
waited stopped                              evaluations since the best one; what ended the run early
rate_scale                                  factor of the recipe's learning rate
bundle seed model preprocess recipe data    settings that a resumed run must have
threads ranks device amp compile torch      what its last bits depend on
origin                                      provenance of the weights, for the bundle
"""

from typing import Any, Literal

from vitrail.core.errors import CorruptFileError, first_line
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import read_model
from vitrail.training.recipe import Recipe

StopReason = Literal["patience", "callback"]
"""What can end a run before its last step for good: a resumed run does not go on."""

# Fields that older versions did not write, and what was meant then.
_NEWER: dict[str, Any] = {
    "left_out": 0,
    "latest": None,
    "start": None,
    "losses": [],
    "waited": 0,
    "stopped": None,
    "rate_scale": 1.0,
}


def with_defaults(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with defaults for fields that older versions did not write."""
    return {**_NEWER, **state}


def read_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with defaults for fields and settings that older versions did not write."""
    try:
        return {
            **with_defaults(state),
            "recipe": Recipe.from_json(state["recipe"]).to_json(),
            "preprocess": Preprocess.from_json(state["preprocess"]).to_json(),
            "model": read_model(state["model"]).to_document(),
        }
    except (KeyError, TypeError, ValueError) as error:  # such as a setting of a newer version
        raise CorruptFileError(f"Checkpoint has a state that this version cannot read: {first_line(error)}") from None
