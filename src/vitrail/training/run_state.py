"""The fields of `state.json` in a checkpoint. Only the file's checksum guards against corruption.

step total seconds losses                   progress; the losses of the last steps, null for skipped ones
best latest start                           the best evaluation, the latest one, and the one before the first step
damaged left_out                            unreadable images; number of skipped steps
waited stopped                              evaluations since the best one; reason for an early end
rate_scale                                  factor of the recipe's learning rate
bundle seed model preprocess recipe         settings that a resumed run must have
corrections data                            checksum of the corrections, fingerprint of the data; must be the same, too
threads ranks device amp compile torch      settings on which the last bits of the weights depend
origin                                      provenance of the weights, for the bundle
"""

from typing import Any, Literal

from vitrail.core.errors import CorruptFileError, first_line
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import read_model
from vitrail.training.recipe import Recipe

StopReason = Literal["patience", "callback"]
"""Reasons for an early end of a run. A run that was stopped is not continued when it is resumed."""

# Fields that older versions did not write, with the values that keep the behaviour of those versions.
_DEFAULTS: dict[str, Any] = {
    "left_out": 0,
    "latest": None,
    "start": None,
    "losses": [],
    "waited": 0,
    "stopped": None,
    "rate_scale": 1.0,
    "corrections": "none",
}


def with_defaults(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with defaults for fields that older versions did not write."""
    return {**_DEFAULTS, **state}


def read_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with defaults for fields and settings that older versions did not write.

    Raise CorruptFileError for fields or settings that this version does not know.
    """
    try:
        return {
            **with_defaults(state),
            "recipe": Recipe.from_json(state["recipe"]).to_json(),
            "preprocess": Preprocess.from_json(state["preprocess"]).to_json(),
            "model": read_model(state["model"]).to_document(),
        }
    except (KeyError, TypeError, ValueError) as error:  # for example a setting of a newer version
        raise CorruptFileError(f"Checkpoint has a state that this version cannot read: {first_line(error)}") from None
