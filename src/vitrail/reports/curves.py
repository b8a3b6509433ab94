"""Curves of training: numbers over steps, and the same over seconds, of one run or of several."""

from collections.abc import Sequence
from typing import NamedTuple

from vitrail.core.html import Html
from vitrail.core.message_files import load_messages
from vitrail.evaluation.history import Events, is_number, select_events
from vitrail.reports.charts import Line, line_chart
from vitrail.reports.translations import translator

_UNITS = (("seconds", 1, 600), ("minutes", 60, 3 * 3600), ("hours", 3600, float("inf")))

t = translator(load_messages(__file__))
"""A sentence of these figures, in both languages."""


class TrainingCurve(NamedTuple):
    """A number over the course of a run."""

    name: str
    """Its name at the end of its line; may be empty."""
    steps: Sequence[float]
    seconds: Sequence[float | None]
    """Seconds since the start of the run at these steps; None where they were not recorded, as by older versions."""
    values: Sequence[float]
    colour: int = 0
    """Index of the palette."""


def draw_curves(curves: Sequence[TrainingCurve], label: str, *, log: bool = False, dots: bool = False) -> Html:
    """One chart over steps and, where seconds are known, one over time, of which `axes` shows one. Names and label may
    be markup in both languages."""
    over_steps = [Line(one.name, one.steps, one.values, one.colour) for one in curves]
    parts = [f'<div class="by-step">{line_chart(over_steps, t("step", "tspan"), label, log=log, dots=dots)}</div>']
    timed = [
        (one, [(second, value) for second, value in zip(one.seconds, one.values, strict=True) if second is not None])
        for one in curves
    ]
    if longest := max((second for _, some in timed for second, _ in some), default=0):
        unit, size = next((unit, size) for unit, size, most in _UNITS if longest <= most)
        over_time = [
            Line(one.name, [second / size for second, _ in some], [value for _, value in some], one.colour)
            for one, some in timed
        ]
        drawn = line_chart(over_time, t(unit, "tspan"), label, log=log, dots=dots)
        parts.append(f'<div class="by-seconds">{drawn}</div>')
    return Html("".join(parts))


def with_axis_choice(content: str) -> Html:
    """Content with the charts of `draw_curves`, below a choice between steps and seconds that needs no script."""
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
    """The course of a number of the events `step` or `evaluate`, in the order of steps."""
    known = sorted((one for one in select_events(events, kind) if is_number(one.get(key))), key=lambda one: one["step"])
    seconds = [one["seconds"] if is_number(one.get("seconds")) else None for one in known]
    return TrainingCurve(name, [one["step"] for one in known], seconds, [factor * one[key] for one in known], colour)
