"""`report.html`: what a run did and how good its model is, in one file."""

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import __version__
from vitrail.data.dataset import Split
from vitrail.errors import DamagedError, VitrailError
from vitrail.evaluation.classify import Answers
from vitrail.evaluation.metrics import calibration_bins
from vitrail.images.preprocess import Preprocess
from vitrail.pages.page import Line, chart, escape, figure, numbers, page, picture, table
from vitrail.storage import write_text
from vitrail.weights.bundle import Bundle

_SHOWN_CLASSES = 30  # up to which the whole confusion matrix is drawn
_SHOWN_MISTAKES = 18


def write_report(
    output: Path,
    bundle: Bundle,
    *,
    scores: dict[str, Any] | None,
    answers: Answers | None,
    split: Split | None,
    pictures: str = "",
) -> None:
    """Write RUN/report.html from RUN/metrics.jsonl and the final answers; `pictures` is what an objective adds."""
    events = read_events(output / "metrics.jsonl")
    config = bundle.model.config
    provenance = bundle.provenance
    curves = _curves(events, provenance["objective"]) if provenance["steps"] else ""
    sections = [_summary(bundle, scores, events), f'<div class="panes">{curves}</div>', pictures]
    if scores is not None and answers is not None and split is not None:
        names = bundle.labels or ()
        sections += [
            f"<h2>Classes</h2>{_classes(scores)}",
            f"<h2>Who is taken for whom</h2>{_confusion(scores, names)}",
            f'<h2>Does it know what it knows?</h2><div class="panes">{_calibration(answers, scores)}</div>',
            f"<h2>The worst mistakes</h2>{_mistakes(answers, split, names, bundle.preprocess)}",
        ]
    sections.append(f"<h2>How to make it again</h2>{_origin(provenance)}")
    title = f"{config.name or config.family} on {provenance['data'].split(':')[0]}"
    subtitle = f"{config.parameters:,} parameters, {config.macs:,} multiply-accumulates a picture"
    try:
        write_text(output / "report.html", page(title, subtitle, "\n".join(sections)))
    except OSError as error:
        raise VitrailError(f"Writing {str(output / 'report.html')!r} failed ({error.strerror}).") from None


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; of steps that a killed run did twice, the later ones. A torn line is left out."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            continue
        key = (event["event"], event["step"]) if event["event"] in ("step", "evaluate") else (number,)
        kept[key] = event
    return list(kept.values())


def _summary(bundle: Bundle, scores: dict[str, Any] | None, events: list[dict[str, Any]]) -> str:
    provenance = bundle.provenance
    pairs = []
    if scores is not None:
        low, high = scores["accuracy_interval"]
        pairs = [
            (f"accuracy on {scores['count']:,} {provenance['scores']['split']} pictures", f"{scores['accuracy']:.1%}"),
            ("95 % interval", f"{low:.1%} to {high:.1%}"),
            ("top 5", f"{scores['top5']:.1%}"),
            ("calibration error", f"{scores['ece']:.3f}"),
        ]
    pairs += [("steps", f"{provenance['steps']:,}"), ("epochs", f"{provenance['epochs']:g}")]
    for event in events:
        if event["event"] == "probe":
            words = f"{event['accuracy']:.1%} of {event['count']:,} training pictures, each left out in turn"
            pairs.append(("before training: least squares on frozen features", words))
    resumed = [event for event in events if event["event"] == "resume"]
    is_exact = all(event.get("exact") for event in resumed)
    how = "with the same bits" if is_exact else "once under other circumstances (see metrics.jsonl): other last bits"
    notes = f"<p>The run was interrupted and went on {len(resumed)} time(s), {how}.</p>" if resumed else ""
    if "damaged" in provenance:
        files = provenance["damaged"]["files"]
        listed = "".join(f"<li>{escape(reason)}</li>" for reason in list(files.values())[:50])
        policy = escape(provenance["damaged"]["policy"])
        notes += f"<p>{len(files)} picture(s) could not be read ({policy}):</p><ul>{listed}</ul>"
    return numbers(pairs) + notes


def _curves(events: list[dict[str, Any]], objective: str) -> str:
    right = {"masked": "of the colours right", "next-pixel": "of the pixels right"}.get(objective, "right")
    steps = sorted((event for event in events if event["event"] == "step"), key=lambda event: event["step"])
    seen = sorted((event for event in events if event["event"] == "evaluate"), key=lambda event: event["step"])

    def line(name: str, some: list[dict[str, Any]], key: str, colour: int) -> Line:
        good = [event for event in some if event[key] is not None]
        return Line(name, [event["step"] for event in good], [event[key] for event in good], colour)

    losses = [line("training", steps, "loss", 0)] + ([line("held out", seen, "loss", 1)] if seen else [])
    figures = [figure("Loss", "training includes augmentation and smoothing", chart(losses, "step", "loss"))]
    if seen:
        curve = chart([line("held out", seen, "accuracy", 1)], "step", "share right", dots=len(seen) < 40)
        last = seen[-1]
        figures.append(
            figure(f"Held-out pictures: {last['accuracy']:.1%} {right} at the end", f"n = {last['count']:,}", curve)
        )
    figures.append(figure("Learning rate", "", chart([line("", steps, "learning_rate", 7)], "step", "learning rate")))
    speed = chart([line("", steps, "images_per_second", 2)], "step", "pictures a second")
    return "".join(figures) + figure("Pictures a second", "everything included", speed)


def _classes(scores: dict[str, Any]) -> str:
    rows = [
        [
            row["label"], f"{row['count']:,}", f"{row['accuracy']:.1%}" if row["count"] else "-",
            "{:.1%} to {:.1%}".format(*row["interval"]) if row["count"] else "-",
        ]
        for row in sorted(scores["per_class"], key=lambda row: (row["accuracy"] is None, row["accuracy"]))
    ]  # fmt: skip
    return table(("class", "pictures", "right", "95 % interval"), rows[:200], frozenset({1, 2, 3}))


def _confusion(scores: dict[str, Any], names: tuple[str, ...]) -> str:
    if scores["confusion"] is None:
        return "<p>There are too many classes for a matrix.</p>"
    matrix = np.array(scores["confusion"])
    if len(matrix) > _SHOWN_CLASSES:
        off = matrix * (1 - np.eye(len(matrix), dtype=int))
        order = np.argsort(-off, axis=None)[:40]
        rows = [
            [names[true], names[said], f"{off[true, said]:,}"]
            for true, said in zip(*np.unravel_index(order, off.shape), strict=True)
            if off[true, said]
        ]
        return table(("is", "was called", "times"), rows, frozenset({2}))
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for name, counts, row in zip(names, matrix, shares, strict=True):
        cells = "".join(
            f'<td style="background:color-mix(in srgb, var(--c0) {100 * share:.0f}%, transparent)'
            f'{";color:#fff" if share > 0.5 else ""}">{count or ""}</td>'
            for count, share in zip(counts, row, strict=True)
        )
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return (
        '<p class="quiet">Rows: what the pictures show. Columns: what the model said. Colour: the share of the row.</p>'
        f'<div class="scroll"><table class="matrix"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _calibration(answers: Answers, scores: dict[str, Any]) -> str:
    right = answers.probabilities.argmax(axis=1) == answers.labels
    bins = [found for found in calibration_bins(answers.probabilities.max(axis=1), right) if found[0]]
    sure, share = [found[1] for found in bins], [found[2] for found in bins]
    drawing = chart(
        [Line("model", sure, share, 0), Line("perfect", [0, 1], [0, 1], 7)], "confidence", "share right", dots=True
    )
    return figure(f"Calibration error {scores['ece']:.3f}", f"15 bins, n = {len(right):,}", drawing)


def _mistakes(answers: Answers, split: Split, names: tuple[str, ...], preprocess: Preprocess) -> str:
    said = answers.probabilities.argmax(axis=1)
    wrong = np.flatnonzero(said != answers.labels)
    if not len(wrong):
        return "<p>None.</p>"
    sure = answers.probabilities[wrong, said[wrong]]
    shown = []
    for place in wrong[np.argsort(-sure, kind="stable")][:_SHOWN_MISTAKES]:
        index = int(answers.indices[place])
        true, answer = names[answers.labels[place]], names[said[place]]
        try:
            image = picture(preprocess.crop(split.pictures[index]), f"a picture of {true}")
        except DamagedError:  # it was readable when it was evaluated
            continue
        caption = (
            f'{escape(true)}<br><span class="wrong">called {escape(answer)}</span>'
            f" ({answers.probabilities[place, said[place]]:.2f})<br>"
            f'<span class="quiet">{escape(Path(split.name_of(index)).name)}</span>'
        )
        shown.append(f"<figure>{image}{caption}</figure>")
    return f'<p class="quiet">Most certain first.</p><div class="pictures">{"".join(shown)}</div>'


def _origin(provenance: dict[str, Any]) -> str:
    plain = {key: value for key, value in provenance.items() if not isinstance(value, dict) and key != "command"}
    rows = [[key.replace("_", " "), value] for key, value in plain.items()]
    rows += [
        ["machine", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"],
        ["versions", f"vitrail {__version__}, torch {torch.__version__}"],
    ]
    return f"<pre>{escape(provenance.get('command') or 'Python')}</pre>{table(('what', 'value'), rows)}"
