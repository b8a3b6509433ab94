"""Charts of metrics over the steps and over the time of training, for one or several runs."""

from collections.abc import Sequence
from typing import NamedTuple

from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.evaluation.history import Events, is_number, select_events
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.translations import translator

_UNITS = (("seconds", 1, 600), ("minutes", 60, 3 * 3600), ("hours", 3600, float("inf")))
"""Name, length and longest run (in seconds) of the units of the time axis."""

t = translator(load_messages(__file__))
"""Return a message of these charts in both languages."""


class TrainingCurve(NamedTuple):
    """A metric over the course of a run."""

    name: str
    """Name at the end of the line. May be empty."""
    steps: Sequence[float]
    seconds: Sequence[float | None]
    """Seconds since the start of the run at each step. None if older versions recorded no time."""
    values: Sequence[float]
    colour: int = 0
    """Index of the palette."""


def draw_curves(curves: Sequence[TrainingCurve], label: str, *, log: bool = False, dots: bool = False) -> Html:
    """Return a chart over steps and, if seconds were recorded, a chart over time. `with_axis_choice` shows one of them.

    Names and `label`, the label of the y axis, may be markup in both languages.
    """
    over_steps = [Line(curve.name, curve.steps, curve.values, curve.colour) for curve in curves]
    parts = [f'<div class="by-step">{line_chart(over_steps, t("step", "tspan"), label, log=log, dots=dots)}</div>']
    timed = [
        (curve, [(at, value) for at, value in zip(curve.seconds, curve.values, strict=True) if at is not None])
        for curve in curves
    ]
    if longest := max((seconds for _, points in timed for seconds, _ in points), default=0):
        unit, size = next((unit, size) for unit, size, most in _UNITS if longest <= most)
        over_time = [
            Line(curve.name, [seconds / size for seconds, _ in points], [value for _, value in points], curve.colour)
            for curve, points in timed
        ]
        chart = line_chart(over_time, t(unit, "tspan"), label, log=log, dots=dots)
        parts.append(f'<div class="by-seconds">{chart}</div>')
    return Html("".join(parts))


def with_axis_choice(content: str) -> Html:
    """Return charts of `draw_curves` below radio buttons that select steps or seconds. Style rules do it, no script."""
    if 'class="by-seconds"' not in content:
        return Html(content)
    choices = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{" checked" if axis == "steps" else ""}>'
        f" {t(f'over-{axis}')}</label>"
        for axis in ("steps", "seconds")
    )
    return Html(f'<div class="axes"><div class="controls">{choices}</div>{content}</div>')


def training_curve(
    events: Events, kind: str, key: str, name: str = "", colour: int = 0, *, factor: float = 1
) -> TrainingCurve:
    """Return the curve of the number `key`, times `factor`, in the events of a kind (`step` or `evaluate`)."""
    points = (event for event in select_events(events, kind) if is_number(event.get(key)))
    points = sorted(points, key=lambda event: event["step"])
    steps = [event["step"] for event in points]
    seconds = [event["seconds"] if is_number(event.get("seconds")) else None for event in points]
    return TrainingCurve(name, steps, seconds, [factor * event[key] for event in points], colour)
