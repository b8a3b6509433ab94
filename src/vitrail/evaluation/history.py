"""History of a run, read from its metrics.jsonl. This module does not import torch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Events = Sequence[dict[str, Any]]


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events of metrics.jsonl. Incomplete and invalid lines are left out.

    If steps were repeated after a kill, only the later events are returned. If the run started again from the
    beginning, only the events of the last start are returned.
    """
    events: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not _is_event(event):
            continue
        if event["event"] == "start":  # the run was killed before its first checkpoint, and all steps are repeated
            events.clear()
        if event["event"] == "resume" and is_number(event.get("step")):  # steps after the checkpoint are repeated
            events = {key: row for key, row in events.items() if len(key) == 1 or row["step"] <= event["step"]}
        key = (event["event"], event["step"]) if event["event"] in ("step", "evaluate") else (number,)
        events[key] = event
    return list(events.values())


LINEAR_HEAD = "linear head on frozen features"
"""Description of the result of a fine-tuning run that changed only the weights of the head."""


def keeps_linear_head(events: Events) -> bool:
    """Return whether the resulting model differs from the initial weights only in its head."""
    if any(event.get("freeze") for event in select_events(events, "start")):
        return True
    if choices := select_events(events, "choice"):
        return choices[-1]["kept"] == "start"
    is_untrained = any(event.get("total") == 0 for event in select_events(events, "start"))
    return is_untrained and bool(select_events(events, "probe"))


# Numbers of events that reports show. Those in _NULLABLE are null if they were not finite.
_REPORTED = {
    "step": ("step", "loss", "learning_rate", "images_per_second"),
    "evaluate": ("step", "loss", "count"),
    "probe": ("accuracy", "count"),
}
_NULLABLE = ("loss", "learning_rate", "images_per_second")


def _is_event(event: object) -> bool:
    """Return whether a line of metrics.jsonl is an event with all numbers that reports show."""
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    for name in _REPORTED.get(event["event"], ()):
        is_null = name in event and event[name] is None and name in _NULLABLE
        if not is_null and not is_number(event.get(name)):
            return False
    return True


def is_number(value: object) -> bool:
    """Return whether a value of an event is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def select_events(events: Events, name: str) -> list[dict[str, Any]]:
    """Return the events with a name, such as "step"."""
    return [event for event in events if event["event"] == name]


RUN_MARK = "# vitrail"
"""First characters of the config.toml of a run."""


def is_run(path: Path) -> bool:
    """Return whether a folder is a run: it has a config.toml that a run wrote."""
    try:
        with (path / "config.toml").open(encoding="utf-8") as file:
            return file.read(len(RUN_MARK)) == RUN_MARK
    except (OSError, ValueError):
        return False
