"""Final evaluations of runs; that of a classifier has classes, confusions, calibration and mistakes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.dataset import Split
from vitrail.data.loader import Loader
from vitrail.errors import DamagedError
from vitrail.evaluation.classify import Answers, answer
from vitrail.evaluation.metrics import calibration_bins, score
from vitrail.images.preprocess import Preprocess
from vitrail.models.base import AnyModel
from vitrail.pages.page import Line, chart, escape, figure, image, table
from vitrail.training.ranks import Ranks

_SHOWN_CLASSES = 30  # up to which the report has the full confusion matrix
_SHOWN_MISTAKES = 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """Results of the final evaluation."""

    scores: dict[str, Any]
    """Scores for `metrics.jsonl` and the bundle."""
    sentence: str
    """The line that is printed at the end of the run."""
    summary: tuple[tuple[str, str], ...]
    """The main numbers of the report, with names."""

    def sections(self) -> str:
        """Its sections of the report, as HTML."""
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Judgement):
    """Final evaluation of a classifier."""

    full: dict[str, Any]
    """All scores (see `evaluation.metrics.score`)."""
    answers: Answers
    labels: tuple[str, ...]
    split: Split
    preprocess: Preprocess

    def sections(self) -> str:
        """Classes, confusions, calibration, mistakes."""
        calibration = _calibration(self.answers, self.full)
        return "\n".join(
            (
                f"<h2>Classes</h2>{_classes(self.full)}",
                f"<h2>Who is taken for whom</h2>{_confusion(self.full, self.labels)}",
                f'<h2>Does it know what it knows?</h2><div class="panes">{calibration}</div>',
                f"<h2>The worst mistakes</h2>{_mistakes(self.answers, self.split, self.labels, self.preprocess)}",
            )
        )


def judge_classifier(model: AnyModel, labels: tuple[str, ...], loader: Loader, ranks: Ranks) -> Judgement | None:
    """The final evaluation of a classifier of these labels. All ranks take part; the first one returns the result."""
    answers = Answers.join(ranks.gather(answer(model, loader)))
    if not ranks.is_first:
        return None
    scores = score(answers.probabilities, answers.labels, labels)
    low, high = scores["accuracy_interval"]
    right, name = round(scores["accuracy"] * scores["count"]), loader.split.name
    return Classification(
        scores={key: scores[key] for key in ("count", "accuracy", "accuracy_interval", "top5", "ece")},
        sentence=f"{name} accuracy {scores['accuracy']:.1%} ({right:,} of {scores['count']:,}; 95 % interval"
        f" {low:.1%} to {high:.1%})",
        summary=(
            (f"accuracy on {scores['count']:,} {name} images", f"{scores['accuracy']:.1%}"),
            ("95 % interval", f"{low:.1%} to {high:.1%}"),
            ("top 5", f"{scores['top5']:.1%}"),
            ("calibration error", f"{scores['ece']:.3f}"),
        ),
        full=scores,
        answers=answers,
        labels=labels,
        split=loader.split,
        preprocess=loader.preprocess,
    )


def _classes(scores: dict[str, Any]) -> str:
    rows = []
    for row in sorted(scores["per_class"], key=lambda row: (row["accuracy"] is None, row["accuracy"])):
        right, interval = "-", "-"
        if row["count"]:
            right, interval = f"{row['accuracy']:.1%}", "{:.1%} to {:.1%}".format(*row["interval"])
        rows.append([row["label"], f"{row['count']:,}", right, interval])
    return table(("class", "images", "right", "95 % interval"), rows[:200], frozenset({1, 2, 3}))


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
        '<p class="quiet">Rows: what the images show. Columns: what the model said. Colour: the share of the row.</p>'
        f'<div class="scroll"><table class="matrix"><thead><tr><td></td>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _calibration(answers: Answers, scores: dict[str, Any]) -> str:
    right = answers.probabilities.argmax(axis=1) == answers.labels
    bins = [found for found in calibration_bins(answers.probabilities.max(axis=1), right) if found[0]]
    sure, share = [found[1] for found in bins], [found[2] for found in bins]
    curve = chart(
        [Line("model", sure, share, 0), Line("perfect", [0, 1], [0, 1], 7)], "confidence", "share right", dots=True
    )
    return figure(f"Calibration error {scores['ece']:.3f}", f"15 bins, n = {len(right):,}", curve)


def _mistakes(answers: Answers, split: Split, names: tuple[str, ...], preprocess: Preprocess) -> str:
    said = answers.probabilities.argmax(axis=1)
    wrong = np.flatnonzero(said != answers.labels)
    if not len(wrong):
        return "<p>None.</p>"
    sure = answers.probabilities[wrong, said[wrong]]
    shown = []
    for place in wrong[np.argsort(-sure, kind="stable")][:_SHOWN_MISTAKES]:
        index = int(answers.indices[place])
        true, given = names[answers.labels[place]], names[said[place]]
        try:
            shown_image = image(preprocess.crop(split.images[index]), f"an image of {true}")
        except DamagedError:  # it was readable when it was evaluated
            continue
        caption = (
            f'{escape(true)}<br><span class="wrong">called {escape(given)}</span>'
            f" ({answers.probabilities[place, said[place]]:.2f})<br>"
            f'<span class="quiet">{escape(Path(split.name_of(index)).name)}</span>'
        )
        shown.append(f"<figure>{shown_image}{caption}</figure>")
    return f'<p class="quiet">Most certain first.</p><div class="images">{"".join(shown)}</div>'
