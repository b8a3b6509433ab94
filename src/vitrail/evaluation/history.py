"""The course of a run, from its metrics.jsonl. No torch here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Events = Sequence[dict[str, Any]]


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; of steps that were repeated after a kill, the later ones, and of a run that began
    anew after one, those since. Incomplete and invalid lines are left out."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not _is_event(event):
            continue
        if event["event"] == "start":  # it was killed before its first checkpoint, and all steps will be repeated
            kept.clear()
        if event["event"] == "resume" and is_number(event.get("step")):  # steps after it will be repeated
            kept = {key: one for key, one in kept.items() if len(key) == 1 or one["step"] <= event["step"]}
        key = (event["event"], event["step"]) if event["event"] in ("step", "evaluate") else (number,)
        kept[key] = event
    return list(kept.values())


LINEAR_HEAD = "linear head on frozen features"
"""The result of a fine-tuning run that changed no weights but those of the head."""


def keeps_linear_head(events: Events) -> bool:
    """Whether the run changed no weights but those of the head, or kept the model from before it changed others."""
    if any(event.get("freeze") for event in select_events(events, "start")):
        return True
    if choices := select_events(events, "choice"):
        return choices[-1]["kept"] == "start"
    is_untrained = any(event.get("total") == 0 for event in select_events(events, "start"))
    return is_untrained and bool(select_events(events, "probe"))


# The numbers of events that a report shows, and those of them that are null where a number was not finite.
_SHOWN = {
    "step": ("step", "loss", "learning_rate", "images_per_second"),
    "evaluate": ("step", "loss", "count"),
    "probe": ("accuracy", "count"),
}
_NULLABLE = ("loss", "learning_rate", "images_per_second")


def _is_event(event: object) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return False
    shown = _SHOWN.get(event["event"], ())
    is_null = (name in event and event[name] is None and name in _NULLABLE for name in shown)
    return all(null or is_number(event.get(name)) for null, name in zip(is_null, shown, strict=True))


def is_number(value: object) -> bool:
    """Whether a value of an event is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def select_events(events: Events, kind: str) -> list[dict[str, Any]]:
    """The events of a kind."""
    return [event for event in events if event["event"] == kind]


RUN_MARK = "# vitrail"


def is_run(path: Path) -> bool:
    """Whether a folder is a run: it has the config.toml that a run writes."""
    try:
        with (path / "config.toml").open(encoding="utf-8") as file:
            return file.read(len(RUN_MARK)) == RUN_MARK
    except (OSError, ValueError):
        return False
