"""`report.html`: the course and the scores of a run, in one file."""

import contextlib
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import __version__
from vitrail.data.dataset import Split
from vitrail.errors import DamagedError, VitrailError
from vitrail.images.preprocess import Preprocess
from vitrail.pages.page import Line, chart, escape, figure, image, numbers, page, table
from vitrail.settings import counted
from vitrail.storage import write_text
from vitrail.training.objectives.base import Judgement, Objective
from vitrail.weights.bundle import Bundle


def write_report(output: Path, bundle: Bundle, objective: Objective, judgement: Judgement | None, split: Split) -> None:
    """Write RUN/report.html from RUN/metrics.jsonl and the final evaluation; images are shown from `split`."""
    events = read_events(output / "metrics.jsonl")
    config = bundle.model.config
    provenance = bundle.provenance
    curves = _curves(events, objective) if provenance["steps"] else ""
    sections = [_summary(bundle, judgement, events), f'<div class="panes">{curves}</div>']
    sections.append(_illustrations(objective, bundle.preprocess, split))
    if judgement is not None:
        sections.append(judgement.sections())
    sections.append(f"<h2>How to make it again</h2>{_origin(provenance)}")
    title = f"{config.name or config.family} on {provenance['data'].split(':')[0]}"
    subtitle = f"{config.parameters:,} parameters, {config.macs:,} multiply-accumulates an image"
    try:
        write_text(output / "report.html", page(title, subtitle, "\n".join(sections)))
    except OSError as error:
        raise VitrailError(f"Writing {str(output / 'report.html')!r} failed ({error.strerror}).") from None


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; of steps that were repeated after a kill, the later ones. Incomplete and invalid
    lines are left out."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not _is_event(event):
            continue
        key = (event["event"], event["step"]) if event["event"] in ("step", "evaluate") else (number,)
        kept[key] = event
    return list(kept.values())


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
    return all(null or _is_number(event.get(name)) for null, name in zip(is_null, shown, strict=True))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _summary(bundle: Bundle, judgement: Judgement | None, events: list[dict[str, Any]]) -> str:
    provenance = bundle.provenance
    pairs = [] if judgement is None else list(judgement.summary)
    pairs += [("steps", f"{provenance['steps']:,}"), ("epochs", f"{provenance['epochs']:g}")]
    for event in events:
        if event["event"] == "probe":
            words = f"{event['accuracy']:.1%} of {event['count']:,} training images, each left out in turn"
            pairs.append(("before training: least squares on frozen features", words))
    resumed = [event for event in events if event["event"] == "resume"]
    is_exact = all(event.get("exact") for event in resumed)
    how = "with the same bits" if is_exact else "once under other circumstances (see metrics.jsonl): other last bits"
    notes = f"<p>The run was interrupted and went on {counted(len(resumed), 'time')}, {how}.</p>" if resumed else ""
    if "damaged" in provenance:
        files = provenance["damaged"]["files"]
        listed = "".join(f"<li>{escape(reason)}</li>" for reason in list(files.values())[:50])
        policy = escape(provenance["damaged"]["policy"])
        notes += f"<p>{counted(len(files), 'image')} could not be read ({policy}):</p><ul>{listed}</ul>"
    return numbers(pairs) + notes


def _curves(events: list[dict[str, Any]], objective: Objective) -> str:
    steps = sorted((event for event in events if event["event"] == "step"), key=lambda event: event["step"])
    seen = sorted((event for event in events if event["event"] == "evaluate"), key=lambda event: event["step"])

    def line(name: str, some: list[dict[str, Any]], key: str, colour: int) -> Line:
        good = [event for event in some if event[key] is not None]
        return Line(name, [event["step"] for event in good], [event[key] for event in good], colour)

    losses = [line("training", steps, "loss", 0)] + ([line("held out", seen, "loss", 1)] if seen else [])
    figures = [figure("Loss", "training includes augmentation and smoothing", chart(losses, "step", "loss"))]
    watched, name = objective.watched, objective.watched_name
    if known := [event for event in seen if _is_number(event.get(watched))]:
        curve = chart([line("held out", known, watched, 1)], "step", name, dots=len(known) < 40)
        title = f"Held-out images: {objective.describe(known[-1])} at the end"
        figures.append(figure(title, f"n = {known[-1]['count']:,}", curve))
    figures.append(figure("Learning rate", "", chart([line("", steps, "learning_rate", 7)], "step", "learning rate")))
    speed = chart([line("", steps, "images_per_second", 2)], "step", "images a second")
    return "".join(figures) + figure("Images a second", "everything included", speed)


@torch.inference_mode()
def _illustrations(objective: Objective, preprocess: Preprocess, split: Split) -> str:
    """The objective's illustrations of some images, if it has any."""
    crops = []
    for index in range(0, len(split), max(len(split) // max(objective.illustrated, 1), 1))[: objective.illustrated]:
        with contextlib.suppress(DamagedError):
            crops.append(preprocess.crop(split.images[index]))
    if not crops:
        return ""
    device = next(objective.parameters()).device
    objective.eval()
    title, rows = objective.illustrate(preprocess.scale(torch.from_numpy(np.stack(crops))).to(device))
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (preprocess.mean, preprocess.std))
    lines = []
    for caption, images_BCHW in rows:
        levels = ((images_BCHW * std + mean).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).cpu().numpy()
        tiles = "".join(f"<figure>{image(tile, caption)}</figure>" for tile in levels)
        lines.append(f'<p class="quiet">{escape(caption)}</p><div class="images">{tiles}</div>')
    return f"<h2>{escape(title)}</h2>{''.join(lines)}"


def _origin(provenance: dict[str, Any]) -> str:
    plain = {key: value for key, value in provenance.items() if not isinstance(value, dict) and key != "command"}
    rows = [[key.replace("_", " "), value] for key, value in plain.items()]
    rows += [
        ["machine", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"],
        ["versions", f"vitrail {__version__}, torch {torch.__version__}"],
    ]
    return f"<pre>{escape(provenance.get('command') or 'Python')}</pre>{table(('what', 'value'), rows)}"
