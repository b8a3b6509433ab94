"""Scores of a classifier: accuracy with its interval, top 5, calibration, scores per class, confusion matrix."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrail.core.intervals import t_quantile, wilson_interval
from vitrail.core.natural_order import natural_key

BINS = 15
"""Number of bins of confidence in calibration."""
_MAX_CONFUSION_CLASSES = 3000  # with more classes, the confusion matrix would need gigabytes


def score_classes(
    probabilities: np.ndarray, labels: np.ndarray, names: tuple[str, ...], *, calibrated: bool = True
) -> dict[str, Any]:
    """Return all scores of `vitrail evaluate` as JSON, from probabilities (n, classes) and true classes (n).

    If `calibrated` is false, `probabilities` are other scores, and the metrics that need probabilities are None.
    """
    count, classes = probabilities.shape
    predicted = probabilities.argmax(axis=1)
    correct = predicted == labels
    # Rank of the true class: number of classes with a larger probability, or with the same one and a smaller index.
    truth_probability = probabilities[np.arange(count), labels][:, None]
    is_earlier = np.arange(classes)[None, :] < labels[:, None]
    is_ahead = (probabilities > truth_probability) | ((probabilities == truth_probability) & is_earlier)
    rank = is_ahead.sum(axis=1)
    counts, hits = np.bincount(labels, minlength=classes), np.bincount(labels[correct], minlength=classes)
    class_metrics = precision_recall_f1(hits, np.bincount(predicted, minlength=classes), counts)
    per_class = [
        {
            "label": name,
            "count": class_count,
            "right": class_hits,
            "accuracy": class_hits / class_count if class_count else None,
            "interval": list(wilson_interval(class_hits, class_count)) if class_count else None,
            **_name_metrics(metrics),
        }
        for name, class_count, class_hits, metrics in zip(
            names, counts.tolist(), hits.tolist(), class_metrics, strict=True
        )
    ]
    confusion = None
    if classes <= _MAX_CONFUSION_CLASSES:
        confusion = np.zeros((classes, classes), np.int64)
        np.add.at(confusion, (labels, predicted), 1)
    log_likelihood = np.log(np.maximum(truth_probability, 1e-12))
    return {
        "count": count,
        "accuracy": float(correct.mean()),
        "accuracy_interval": list(wilson_interval(int(correct.sum()), count)),
        "top5": float((rank < 5).mean()),
        "ece": calibration_error(probabilities.max(axis=1), correct) if calibrated else None,
        "negative_log_likelihood": float(-log_likelihood.mean()) if calibrated else None,
        "macro": _name_metrics(_macro_average(class_metrics)),
        "per_class": per_class,
        "confusion": None if confusion is None else confusion.tolist(),
    }


def precision_recall_f1(hits: np.ndarray, predicted_counts: np.ndarray, true_counts: np.ndarray) -> np.ndarray:
    """Return precision, recall and F1 of each class (classes, 3) from numbers of images, as scikit-learn does.

    A division by zero gives 0: the precision of a class that is never predicted, the recall of a class without images.
    All three are NaN for a class that is never predicted and has no images.
    """
    either_count = predicted_counts + true_counts
    numerators = np.stack([hits, hits, 2 * hits], axis=1)
    denominators = np.stack([predicted_counts, true_counts, either_count], axis=1)
    return np.where(either_count[:, None] > 0, numerators / np.maximum(denominators, 1), np.nan)


def _macro_average(class_metrics: np.ndarray) -> np.ndarray:
    """Return the mean of each metric over the classes that occur or are predicted; NaN if there is no such class."""
    used = class_metrics[~np.isnan(class_metrics).any(axis=1)]
    return used.mean(axis=0) if len(used) else np.full(class_metrics.shape[1], np.nan)


def _name_metrics(metrics: np.ndarray) -> dict[str, float | None]:
    """Return precision, recall and F1 by name, with None in place of NaN."""
    values = (None if math.isnan(value) else value for value in metrics.tolist())
    return dict(zip(("precision", "recall", "f1"), values, strict=True))


def worst_first(per_class: Sequence[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Return the rows of `per_class` with images, sorted by a metric; equal rows by name, 2 before 10."""
    evaluated = (row for row in per_class if row["count"])
    return sorted(evaluated, key=lambda row: (row[metric], natural_key(row["label"])))


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float | None:
    """Return the average precision of a label as scikit-learn defines it, from scores (n) and truth (n).

    Images with equal scores are counted together. None if no image has the label.
    """
    order = np.argsort(-scores, kind="stable")
    hits = np.cumsum(truth[order] > 0)
    if not len(hits) or not hits[-1]:
        return None
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)  # last of equal scores
    precision, recall = hits[last] / (last + 1), hits[last] / hits[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def score_labels(
    scores: np.ndarray, labels: np.ndarray, names: tuple[str, ...], thresholds: Sequence[float] | None = None
) -> dict[str, Any]:
    """Return all scores of `vitrail evaluate` for images with several labels as JSON.

    Scores and true labels are (n, classes). Metrics that need `thresholds` are left out without them.
    """
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        precision = average_precision(scores[:, index], labels[:, index])
        rows.append({"label": name, "count": int(labels[:, index].sum()), "average_precision": precision})
    precisions = [row["average_precision"] for row in rows if row["average_precision"] is not None]
    result: dict[str, Any] = {
        "count": len(scores),
        "map": float(np.mean(precisions)) if precisions else None,
        "average_precision": {row["label"]: row["average_precision"] for row in rows},
    }
    if thresholds is not None:
        predicted = scores >= np.asarray(thresholds)
        hits = (predicted & (labels > 0)).sum(axis=0)
        predicted_counts, true_counts = predicted.sum(axis=0), labels.sum(axis=0, dtype=np.int64)
        label_metrics = precision_recall_f1(hits, predicted_counts, true_counts)
        exact = int((predicted == (labels > 0)).all(axis=1).sum())  # accuracy, as scikit-learn defines it
        for index, row in enumerate(rows):
            row |= {
                "threshold": float(thresholds[index]),
                "precision": float(hits[index] / predicted_counts[index]) if predicted_counts[index] else None,
                "recall": float(hits[index] / true_counts[index]) if true_counts[index] else None,
                "f1": _name_metrics(label_metrics[index])["f1"],
            }
        result |= {
            "macro": _name_metrics(_macro_average(label_metrics)),
            "f1": float(2 * hits.sum() / max(predicted_counts.sum() + true_counts.sum(), 1)),
            "accuracy": exact / max(len(scores), 1),
            "accuracy_interval": list(wilson_interval(exact, len(scores))) if len(scores) else None,
        }
    return result | {"per_class": rows}


def best_thresholds(scores: np.ndarray, labels: np.ndarray) -> tuple[float, ...]:
    """Return the threshold of each label with the highest F1 on scores and labels (n, classes).

    The threshold is the middle between two scores; of several equally good thresholds, the middle one is chosen. It is
    0.5 for a label that no image or every image has.
    """
    thresholds = []
    for column, truth in zip(scores.T.astype(np.float64), labels.T > 0, strict=True):
        order = np.argsort(-column, kind="stable")
        hits = np.cumsum(truth[order])
        if not len(hits) or not hits[-1] or hits[-1] == len(hits):
            thresholds.append(0.5)
            continue
        last = np.append(np.flatnonzero(np.diff(column[order])), len(order) - 1)  # last of equal scores
        f1 = 2 * hits[last] / (last + 1 + hits[-1])
        best = np.flatnonzero(f1 == f1.max())
        index = last[best[len(best) // 2]]
        next_score = column[order][index + 1] if index + 1 < len(order) else 0.0
        thresholds.append(float((column[order][index] + next_score) / 2))
    return tuple(thresholds)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean of independent values, or None for a single value."""
    if len(values) < 2:
        return None
    half_width = t_quantile(0.975, len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half_width, float(np.mean(values)) + half_width


def calibration_bins(confidence: np.ndarray, correct: np.ndarray) -> list[tuple[int, float, float]]:
    """Return the number of predictions, the mean confidence and the accuracy of each of 15 equal bins of confidence."""
    bin_of = np.minimum((confidence * BINS).astype(int), BINS - 1)
    bins = []
    for number in range(BINS):
        inside = bin_of == number
        count = int(inside.sum())
        mean_confidence = float(confidence[inside].mean()) if count else 0.0
        accuracy = float(correct[inside].mean()) if count else 0.0
        bins.append((count, mean_confidence, accuracy))
    return bins


def calibration_error(confidence: np.ndarray, correct: np.ndarray) -> float:
    """Return the expected calibration error: the mean difference of confidence and accuracy over the bins."""
    bins = calibration_bins(confidence, correct)
    return float(sum(count * abs(sure - accuracy) for count, sure, accuracy in bins) / len(confidence))


_IMPROBABLE = 0.05


def find_doubtful_labels(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return whether the label of each image is likely wrong (n).

    A label is doubtful if its probability is below 5 %, and the probability of the predicted class is at least its mean
    probability over the images with that label (confident learning, arXiv 1911.00068, section 3.1).

    On Fashion-MNIST's test images with 5 % wrong labels, the embedded model finds 86 % of the wrong labels, and 80 % of
    the doubtful labels are wrong. With 1 % wrong labels, the numbers are 84 % and 43 %.
    """
    count, classes = probabilities.shape
    rows = np.arange(count)
    counts = np.bincount(labels, minlength=classes)
    label_probability = probabilities[rows, labels]
    class_means = np.bincount(labels, label_probability, minlength=classes) / np.maximum(counts, 1)
    class_means[counts == 0] = np.inf
    predicted = probabilities.argmax(axis=1)
    is_confident = probabilities[rows, predicted] >= class_means[predicted]
    return (predicted != labels) & is_confident & (label_probability < _IMPROBABLE)
