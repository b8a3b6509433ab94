"""Show the final evaluation of a classifier in the run report: classes, calibration, confusions and mistakes."""

from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.errors import CorruptFileError
from vitrail.core.html import Html, escape
from vitrail.core.intervals import wilson_interval
from vitrail.core.message_files import load_messages
from vitrail.data.dataset import Split
from vitrail.data.preprocess import Preprocess
from vitrail.evaluation.metrics import BINS, calibration_bins, worst_first
from vitrail.evaluation.split_predictions import SplitPredictions
from vitrail.reports.charts import Interval, Line, interval_chart, line_chart
from vitrail.reports.page_kit import figure, image, table
from vitrail.reports.translations import translator
from vitrail.training.objectives.judgement import Classification

MESSAGES = load_messages(__file__)
_MAX_CHART_CLASSES = 30  # also the largest number of classes with a confusion matrix
_MAX_TABLE_CLASSES = 1000
_MAX_MISTAKES = 18
_MAX_PAIRS = 40  # without a confusion matrix
_MAX_PAIRS_BESIDE_MATRIX = 12
_TOP_K = 5

t = translator(MESSAGES)
"""Return a message of the final evaluation in both languages."""


def summary(judgement: Classification) -> list[tuple[str, str]]:
    """Return accuracy with its interval, top-5 accuracy and calibration error."""
    scores, split = judgement.all_scores, split_label(judgement.split.name)
    low, high = (f"{end:.1%}" for end in scores["accuracy_interval"])
    return [
        (t("accuracy-on", count=scores["count"], split=split, low=low, high=high), f"{scores['accuracy']:.1%}"),
        # Top-5 accuracy is always 1 for five classes or fewer.
        *([(t("top5"), f"{scores['top5']:.1%}")] if len(judgement.labels) > _TOP_K else []),
        (t("ece"), f"{scores['ece']:.3f}"),
    ]


def sections(judgement: Classification) -> str:
    """Return sections about accuracy per class, calibration, confusions and mistakes."""
    predictions, labels, scores = judgement.predictions, judgement.labels, judgement.all_scores
    mistakes = _mistake_gallery(predictions, judgement.split, labels, judgement.preprocess)
    return "\n".join(
        (
            f"<h2>{t('classes')}</h2>{_class_figures(scores, _calibration_figure(predictions, scores))}",
            f"<h2>{t('confusion')}</h2>{_confusion_figures(predictions, labels)}",
            f"<h2>{t('mistakes')}</h2>{mistakes}",
        )
    )


def split_label(name: str) -> Html:
    """Return the name of a split in both languages."""
    return t(f"split-{name}") if f"split-{name}" in MESSAGES else escape(name)


def _class_figures(scores: dict[str, Any], calibration: str) -> str:
    """Return a chart and a table of the accuracy of each class, worst first. `calibration` is beside the chart."""
    evaluated = worst_first(scores["per_class"], "accuracy")
    chart_rows = [
        Interval(row["label"], 100 * row["accuracy"], *(100 * end for end in row["interval"]))
        for row in evaluated[:_MAX_CHART_CLASSES]
    ]
    title, note = t("one-class"), t("classes-note", count=scores["count"])
    if len(evaluated) > 1:
        title = t(
            "from-to",
            low=f"{evaluated[0]['accuracy']:.1%}",
            worst=evaluated[0]["label"],
            high=f"{evaluated[-1]['accuracy']:.1%}",
            best=evaluated[-1]["label"],
        )
    if len(evaluated) > len(chart_rows):
        note = t("worst-note", shown=len(chart_rows), classes=len(evaluated), count=scores["count"])
    axis = t("accuracy-axis", "tspan")
    chart = figure(title, note, interval_chart(chart_rows, axis, ends=(-2, 102), zero=100 * scores["accuracy"]))
    rows = [
        [
            row["label"],
            f"{row['count']:,}",
            f"{row['accuracy']:.1%}",
            f"{row['precision']:.1%}",
            f"{row['f1']:.1%}",
        ]
        for row in evaluated[:_MAX_TABLE_CLASSES]
    ]
    rows += [[row["label"], "0", *"---"] for row in scores["per_class"] if not row["count"]][
        : _MAX_TABLE_CLASSES - len(rows)
    ]
    headers = [t(name) for name in ("class", "images", "recall", "precision", "f1")]
    listing = table(headers, rows, numeric=frozenset(range(1, len(headers))))
    count = len(scores["per_class"])
    caption = t("all-classes" if len(rows) == count else "some-classes", shown=len(rows), classes=count)
    return f'<div class="panes">{chart}{calibration}</div><details><summary>{caption}</summary>{listing}</details>'


def _confusion_figures(predictions: SplitPredictions, names: tuple[str, ...]) -> str:
    """Return a table of the most confused pairs of classes, and the confusion matrix if it is small enough to read."""
    predicted = predictions.probabilities.argmax(axis=1)
    pairs, times = np.unique(np.stack([predictions.labels, predicted], axis=1), axis=0, return_counts=True)
    class_counts = np.bincount(predictions.labels, minlength=len(names))
    wrong = np.flatnonzero(pairs[:, 0] != pairs[:, 1])
    max_pairs = _MAX_PAIRS if len(names) > _MAX_CHART_CLASSES else _MAX_PAIRS_BESIDE_MATRIX
    order = wrong[np.argsort(-times[wrong], kind="stable")][:max_pairs]
    rows = [
        [names[truth], names[prediction], f"{count:,}", f"{count / class_counts[truth]:.1%}"]
        for (truth, prediction), count in zip(pairs[order].tolist(), times[order].tolist(), strict=True)
    ]
    headers = [t(name) for name in ("is", "predicted", "times", "of-class")]
    pair_table = table(headers, rows, numeric=frozenset({2, 3})) if rows else t("no-mistakes", "p")
    pair_list = f"<div><h3>{t('pairs')}</h3>{pair_table}</div>"
    if len(names) > _MAX_CHART_CLASSES:
        return f"{t('too-many', 'p', classes=len(names))}{pair_list}"
    matrix = np.zeros((len(names), len(names)), np.int64)
    matrix[pairs[:, 0], pairs[:, 1]] = times
    return f'{t("matrix-note", "p")}<div class="confusion">{_confusion_matrix(matrix, names)}{pair_list}</div>'


def _confusion_matrix(matrix: np.ndarray, names: tuple[str, ...]) -> str:
    """Return counts (true class, predicted class) as a table, coloured by the share of the row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for truth, counts in zip(names, matrix, strict=True):
        total, cells = max(counts.sum(), 1), []
        for prediction, count in zip(names, counts, strict=True):
            tooltip = f"{escape(truth)} → {escape(prediction)}: {count:,} / {counts.sum():,} ({count / total:.1%})"
            style = f"background:color-mix(in srgb, var(--c0) {100 * count / total:.0f}%, transparent)"
            style += ";color:var(--paper)" if count > 0.7 * total else ""
            cells.append(f'<td title="{tooltip}" style="{style}">{count or ""}</td>')
        rows.append(f"<tr><th>{escape(truth)}</th>{''.join(cells)}</tr>")
    css_class = "matrix long" if max(map(len, names)) > 3 else "matrix"  # `long` writes column names vertically
    head_row = f"<thead><tr><td></td>{head}</tr></thead>"
    return f'<div class="scroll"><table class="{css_class}">{head_row}<tbody>{"".join(rows)}</tbody></table></div>'


def _calibration_figure(predictions: SplitPredictions, scores: dict[str, Any]) -> str:
    """Return the reliability diagram: accuracy over confidence, with the calibration error in the title."""
    confidence = predictions.probabilities.max(axis=1)
    is_correct = predictions.probabilities.argmax(axis=1) == predictions.labels
    bins = [bin_ for bin_ in calibration_bins(confidence, is_correct) if bin_[0]]
    bin_confidence, bin_accuracy = [100 * mean for _, mean, _ in bins], [100 * share for _, _, share in bins]
    lines = [
        Line(t("perfect", "tspan"), [0, 100], [0, 100], 7),
        Line(
            t("model", "tspan"),
            bin_confidence,
            bin_accuracy,
            0,
            bars=[_percent_interval(wilson_interval(round(count * share), count)) for count, _, share in bins],
        ),
    ]
    chart = line_chart(lines, t("confidence-axis", "tspan"), t("accuracy-axis", "tspan"), dots=True)
    gap = float(confidence.mean() - is_correct.mean())
    title = t("too-sure" if gap > 0 else "too-unsure", ece=f"{scores['ece']:.3f}", gap=f"{abs(100 * gap):.1f}")
    return figure(title, t("calibration-note", bins=BINS, count=len(is_correct)), chart)


def _percent_interval(interval: tuple[float, float]) -> tuple[float, float]:
    return 100 * interval[0], 100 * interval[1]


def _mistake_gallery(
    predictions: SplitPredictions, split: Split, names: tuple[str, ...], preprocess: Preprocess
) -> str:
    """Return the images of the most confident mistakes, with true and predicted class."""
    predicted = predictions.probabilities.argmax(axis=1)
    wrong = np.flatnonzero(predicted != predictions.labels)
    if not len(wrong):
        return t("no-mistakes", "p")
    confidence = predictions.probabilities[wrong, predicted[wrong]]
    tiles = []
    for row in wrong[np.argsort(-confidence, kind="stable")][:_MAX_MISTAKES]:
        index = int(predictions.indices[row])
        truth, prediction = names[predictions.labels[row]], names[predicted[row]]
        try:
            picture = image(preprocess.crop(split.images[index]), f"an image of {truth}")
        except CorruptFileError:  # the file changed after the evaluation
            continue
        prediction_text = t("was-predicted", label=prediction)
        caption = (
            f'{escape(truth)}<br><span class="wrong">{prediction_text}</span>'
            f" ({predictions.probabilities[row, predicted[row]]:.1%})<br>"
            f'<span class="quiet">{escape(Path(split.image_name(index)).name)}</span>'
        )
        tiles.append(f"<figure>{picture}{caption}</figure>")
    note = t("mistakes-note", "p", shown=len(tiles), wrong=len(wrong), count=len(predicted))
    return f'{note}<div class="images">{"".join(tiles)}</div>'
