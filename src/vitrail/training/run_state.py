"""Validation of a checkpoint's `state.json`: a valid checksum does not mean that the values are valid.

step total seconds losses                   progress; the losses of the last steps, null for skipped ones
best latest start                           the best evaluation, the latest one, and the one before the first step
damaged left_out                            damaged images, skipped steps
waited stopped                              evaluations since the best one; what ended the run early
rate_scale                                  factor of the recipe's learning rate
bundle seed model preprocess recipe data    settings that a resumed run must have
threads ranks device amp compile torch      what its last bits depend on
origin                                      provenance of the weights, for the bundle
"""

import json
from typing import Any, Literal, get_args

from vitrail.core.errors import DamagedError, UsageError
from vitrail.core.settings import check_integer, check_number, check_share, spoken
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import read_model
from vitrail.training.recipe import Recipe

Ending = Literal["patience", "callback"]
ENDINGS = get_args(Ending)
"""What can end a run before its last step for good: a resumed run does not go on."""

ORIGINS = ("finetuned_from", "faces")
"""What a run may say of where it comes from: the bundle it began with, and how faces were made ready."""

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


def filled(state: dict[str, Any]) -> dict[str, Any]:
    """The state, with defaults for fields that older versions did not write."""
    return {**_NEWER, **state}


def check_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state with defaults filled in and every field checked."""
    try:
        return _checked(filled(state))
    except UsageError as error:
        raise DamagedError(str(error)) from None


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    known = (*_TEXTS, *_FLAGS, *_TABLES, *_NEWER, "seed", "threads", "ranks", "total", "step", "seconds", "best")
    if missing := [name for name in known if name not in state]:
        raise UsageError(f"State must have {', '.join(missing)}, got none.")
    for names, kind, called in ((_TEXTS, str, "a text"), (_FLAGS, bool, "true or false"), (_TABLES, dict, "a table")):
        for name in names:
            if not isinstance(state[name], kind):
                raise UsageError(f"{spoken(name)} must be {called}, got {state[name]!r}.")
    check_integer("seed", state["seed"], low=0, high=2**63 - 1)
    check_integer("threads", state["threads"], low=1, high=4096)
    check_integer("ranks", state["ranks"], low=1, high=10**6)
    check_integer("total", state["total"], low=1, high=10**9)
    check_integer("step", state["step"], low=1, high=state["total"])
    check_integer("left_out", state["left_out"], low=0, high=state["step"])
    check_integer("waited", state["waited"], low=0, high=state["step"])
    if state["stopped"] not in (None, *ENDINGS):
        raise UsageError(f"Stopped must be null or one of {', '.join(ENDINGS)}, got {state['stopped']!r}.")
    check_number("seconds", state["seconds"], low=0, below=1e12)
    check_number("rate_scale", state["rate_scale"], low=0, below=1e9)
    _check_best(state["best"], state["step"])
    _check_latest(state["latest"])
    _check_start(state["start"])
    if not isinstance(state["losses"], list):
        raise UsageError(f"Losses must be a list, got {state['losses']!r}.")
    for loss in state["losses"]:
        if loss is not None:
            check_number("losses", loss, low=-1e300, below=1e300)
    for path, reason in state["damaged"].items():
        if not isinstance(reason, str):
            raise UsageError(f"Reason of damaged {path!r} must be a text, got {reason!r}.")
    _check_origin(state["origin"])
    return {
        **state,
        "recipe": Recipe.from_json(state["recipe"]).to_json(),
        "preprocess": Preprocess.from_json(state["preprocess"]).to_json(),
        "model": read_model(state["model"]).to_document(),
    }


_TEXTS = ("bundle", "data", "device", "torch")
_FLAGS = ("amp", "compile")
_TABLES = ("model", "preprocess", "recipe", "damaged", "origin")


def _check_best(best: object, step: int) -> None:
    """Null, or an evaluation (see `Objective.evaluate`) with its step and score."""
    if best is None:
        return
    if not isinstance(best, dict) or not {"step", "score", "loss", "count"} <= best.keys():
        raise UsageError(f"Best must be null or have step, score, loss and count, got {best!r}.")
    check_integer("step of the best", best["step"], low=1, high=step)
    _check_numbers("best", best)


def _check_latest(latest: object) -> None:
    """Null before the first evaluation. Numbers of an evaluation that were not finite are null."""
    if latest is not None:
        found = _check_evaluation("latest", latest)
        _check_numbers("latest", {name: value for name, value in found.items() if value is not None or name == "count"})


def _check_start(start: object) -> None:
    """Null if the run does not choose between two models at the end; a count of 0 if there are no held-out images."""
    if start not in (None, {"count": 0}):
        _check_numbers("start", _check_evaluation("start", start))


def _check_evaluation(owner: str, found: object) -> dict[str, Any]:
    if not isinstance(found, dict) or not {"score", "loss", "count"} <= found.keys():
        raise UsageError(f"{spoken(owner)} must be null or have score, loss and count, got {found!r}.")
    return found


def _check_numbers(owner: str, found: dict[str, Any]) -> None:
    for name, value in found.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not -1e300 < value < 1e300:
            raise UsageError(f"{spoken(name)} of the {owner} must be a finite number, got {value!r}.")
    check_integer(f"count of the {owner}", found["count"], low=0, high=10**12)
    check_share(f"accuracy of the {owner}", found.get("accuracy", 0), 1)


def _check_origin(origin: dict[str, Any]) -> None:
    # It goes into the bundle's provenance, where it must not stand for something else.
    try:
        json.dumps(origin, allow_nan=False)
    except ValueError:
        raise UsageError("Origin must have finite numbers, got others.") from None
    if not all(name in ORIGINS and isinstance(value, dict) for name, value in origin.items()):
        raise UsageError(f"Origin must have nothing but {' and '.join(ORIGINS)}, got {', '.join(origin)}.")
