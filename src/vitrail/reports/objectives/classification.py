"""The final evaluation of a classifier in the report: classes, calibration, confusions and mistakes."""

from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.errors import CorruptFileError
from vitrail.core.html import Html, escape
from vitrail.core.intervals import wilson_interval
from vitrail.core.message_files import load_messages
from vitrail.data.dataset import Split
from vitrail.data.preprocess import Preprocess
from vitrail.evaluation.metrics import BINS, calibration_bins
from vitrail.evaluation.split_predictions import SplitPredictions
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.page_kit import figure, image, table
from vitrail.reports.translations import translator
from vitrail.training.objectives.judgement import Classification

MESSAGES = load_messages(__file__)
_SHOWN_CLASSES = 30  # up to which the report has the full confusion matrix
_LISTED_CLASSES = 1000
_SHOWN_MISTAKES, _SHOWN_PAIRS = 18, 40
_TOP = 5

t = translator(MESSAGES)
"""A sentence of the final evaluation, in both languages."""


def summary(judgement: Classification) -> list[tuple[str, str]]:
    """Accuracy with its interval, top-5 accuracy and calibration error."""
    scores, split = judgement.full, split_label(judgement.split.name)
    low, high = (f"{end:.1%}" for end in scores["accuracy_interval"])
    return [
        (t("accuracy-on", count=scores["count"], split=split, low=low, high=high), f"{scores['accuracy']:.1%}"),
        # Of five classes or fewer, the five most probable are all.
        *([(t("top5"), f"{scores['top5']:.1%}")] if len(judgement.labels) > _TOP else []),
        (t("ece"), f"{scores['ece']:.3f}"),
    ]


def sections(judgement: Classification) -> str:
    """Classes, calibration, confusions, mistakes."""
    answers, labels = judgement.answers, judgement.labels
    mistakes = _mistakes(answers, judgement.split, labels, judgement.preprocess)
    return "\n".join(
        (
            f"<h2>{t('classes')}</h2>{_classes(judgement.full, _calibration(answers, judgement.full))}",
            f"<h2>{t('confusion')}</h2>{_confusion(answers, labels)}",
            f"<h2>{t('mistakes')}</h2>{mistakes}",
        )
    )


def split_label(name: str) -> Html:
    """The name of a split, in both languages."""
    return t(f"split-{name}") if f"split-{name}" in MESSAGES else escape(name)


def _classes(scores: dict[str, Any], calibration: str) -> str:
    """The accuracy of each class, worst first, as a figure beside the calibration and as a table."""
    known = sorted((row for row in scores["per_class"] if row["count"]), key=lambda row: row["accuracy"])
    drawn = [
        Interval(row["label"], 100 * row["accuracy"], *(100 * end for end in row["interval"]))
        for row in known[:_SHOWN_CLASSES]
    ]
    title, note = t("one-class"), t("classes-note", count=scores["count"])
    if len(known) > 1:
        title = t(
            "from-to",
            low=f"{known[0]['accuracy']:.1%}",
            worst=known[0]["label"],
            high=f"{known[-1]['accuracy']:.1%}",
            best=known[-1]["label"],
        )
    if len(known) > len(drawn):
        note = t("worst-note", shown=len(drawn), classes=len(known), count=scores["count"])
    axis = t("accuracy-axis", "tspan")
    worst = figure(title, note, interval_chart(drawn, axis, ends=(-2, 102), zero=100 * scores["accuracy"]))
    rows = [
        [row["label"], f"{row['count']:,}", f"{row['accuracy']:.1%}", "{:.1%} … {:.1%}".format(*row["interval"])]
        for row in known[:_LISTED_CLASSES]
    ]
    rows += [[row["label"], "0", "-", "-"] for row in scores["per_class"] if not row["count"]][
        : _LISTED_CLASSES - len(rows)
    ]
    listed = table([t(name) for name in ("class", "images", "accuracy", "interval")], rows, frozenset({1, 2, 3}))
    classes = len(scores["per_class"])
    summary = t("all-classes" if len(rows) == classes else "some-classes", shown=len(rows), classes=classes)
    return f'<div class="panes">{worst}{calibration}</div><details><summary>{summary}</summary>{listed}</details>'


def _confusion(answers: SplitPredictions, names: tuple[str, ...]) -> str:
    """The matrix, if it is small enough to read, beside the pairs that are confused most often."""
    said = answers.probabilities.argmax(axis=1)
    pairs, times = np.unique(np.stack([answers.labels, said], axis=1), axis=0, return_counts=True)
    counts = np.bincount(answers.labels, minlength=len(names))
    wrong = np.flatnonzero(pairs[:, 0] != pairs[:, 1])
    order = wrong[np.argsort(-times[wrong], kind="stable")][: _SHOWN_PAIRS if len(names) > _SHOWN_CLASSES else 12]
    rows = [
        [names[true], names[given], f"{times[at]:,}", f"{times[at] / counts[true]:.1%}"]
        for at in order
        for true, given in [pairs[at]]
    ]
    headers = [t(name) for name in ("is", "called", "times", "of-class")]
    listed = table(headers, rows, frozenset({2, 3})) if rows else t("no-mistakes", "p")
    confused = f"<div><h3>{t('pairs')}</h3>{listed}</div>"
    if len(names) > _SHOWN_CLASSES:
        return f"{t('too-many', 'p', classes=len(names))}{confused}"
    matrix = np.zeros((len(names), len(names)), np.int64)
    matrix[pairs[:, 0], pairs[:, 1]] = times
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = []
    for name, row in zip(names, matrix, strict=True):
        total = max(row.sum(), 1)
        cells = "".join(
            f'<td title="{escape(name)} → {escape(given)}: {count:,} / {row.sum():,} ({count / total:.1%})" style="'
            f"background:color-mix(in srgb, var(--c0) {100 * count / total:.0f}%, transparent)"
            f'{";color:var(--paper)" if count > 0.7 * total else ""}">{count or ""}</td>'
            for given, count in zip(names, row, strict=True)
        )
        lines.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    is_long = max(map(len, names)) > 3
    drawn = (
        f'<div class="scroll"><table class="matrix{" long" if is_long else ""}"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
    return f'{t("matrix-note", "p")}<div class="confusion">{drawn}{confused}</div>'


def _calibration(answers: SplitPredictions, scores: dict[str, Any]) -> str:
    confidence = answers.probabilities.max(axis=1)
    right = answers.probabilities.argmax(axis=1) == answers.labels
    bins = [found for found in calibration_bins(confidence, right) if found[0]]
    sure, share = [100 * found[1] for found in bins], [100 * found[2] for found in bins]
    lines = [
        Line(t("perfect", "tspan"), [0, 100], [0, 100], 7),
        Line(
            t("model", "tspan"),
            sure,
            share,
            0,
            bars=[_percent(wilson_interval(round(n * part), n)) for n, _, part in bins],
        ),
    ]
    curve = line_chart(lines, t("confidence-axis", "tspan"), t("accuracy-axis", "tspan"), dots=True)
    gap = float(confidence.mean() - right.mean())
    title = t("too-sure" if gap > 0 else "too-unsure", ece=f"{scores['ece']:.3f}", gap=f"{abs(100 * gap):.1f}")
    return figure(title, t("calibration-note", bins=BINS, count=len(right)), curve)


def _percent(interval: tuple[float, float]) -> tuple[float, float]:
    return 100 * interval[0], 100 * interval[1]


def _mistakes(answers: SplitPredictions, split: Split, names: tuple[str, ...], preprocess: Preprocess) -> str:
    said = answers.probabilities.argmax(axis=1)
    wrong = np.flatnonzero(said != answers.labels)
    if not len(wrong):
        return t("no-mistakes", "p")
    sure = answers.probabilities[wrong, said[wrong]]
    shown = []
    for place in wrong[np.argsort(-sure, kind="stable")][:_SHOWN_MISTAKES]:
        index = int(answers.indices[place])
        true, given = names[answers.labels[place]], names[said[place]]
        try:
            shown_image = image(preprocess.crop(split.images[index]), f"an image of {true}")
        except CorruptFileError:  # it was readable when it was evaluated
            continue
        called = t("was-called", label=given)
        caption = (
            f'{escape(true)}<br><span class="wrong">{called}</span>'
            f" ({answers.probabilities[place, said[place]]:.1%})<br>"
            f'<span class="quiet">{escape(Path(split.image_name(index)).name)}</span>'
        )
        shown.append(f"<figure>{shown_image}{caption}</figure>")
    note = t("mistakes-note", "p", shown=len(shown), wrong=len(wrong), count=len(said))
    return f'{note}<div class="images">{"".join(shown)}</div>'
