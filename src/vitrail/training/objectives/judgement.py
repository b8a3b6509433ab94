"""Results of the final evaluation of a run, as numbers and arrays, which `reports.objectives` renders."""

import dataclasses
from typing import Any

from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import Loader
from vitrail.data.preprocess import Preprocess
from vitrail.evaluation.metrics import score_classes
from vitrail.evaluation.predictions.saved_predictions import SavedPredictions
from vitrail.evaluation.split_predictions import SplitPredictions, predict_split
from vitrail.models.base import AnyModel
from vitrail.training.ranks import Ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgement:
    """Result of the final evaluation. Its class determines how the report shows it."""

    scores: dict[str, Any]
    """Scores for `metrics.jsonl` and the bundle."""
    sentence: str
    """The line that is printed at the end of the run."""
    summary: tuple[tuple[str, str], ...] = ()
    """Names and values of the main numbers in the report, for classes without their own section in the report."""

    def to_saved_predictions(self, dataset: Dataset) -> SavedPredictions | None:
        """Return the predictions for each image, to be saved as `RUN/answers.npz`; None if they are not classes."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Judgement):
    """Final evaluation of a classifier with one label per image."""

    all_scores: dict[str, Any]
    """The result of `evaluation.metrics.score_classes`, of which `scores` is a selection."""
    predictions: SplitPredictions
    labels: tuple[str, ...]
    split: Split
    preprocess: Preprocess

    def to_saved_predictions(self, dataset: Dataset) -> SavedPredictions:
        return SavedPredictions.of(dataset, self.split, self.predictions.indices, self.predictions.probabilities)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelling(Judgement):
    """Final evaluation of a multi-label model."""

    all_scores: dict[str, Any]
    """The result of `evaluation.metrics.score_labels`, of which `scores` is a selection."""
    split: str
    """Name of the split."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairVerification(Judgement):
    """Final evaluation of an embedding: verification of pairs of images as the same or different identities."""


def judge_classifier(model: AnyModel, labels: tuple[str, ...], loader: Loader, ranks: Ranks) -> Judgement | None:
    """Return the final evaluation of a classifier of the classes `labels`.

    All ranks take part; the first rank returns the result, the others None.
    """
    predictions = SplitPredictions.join(ranks.gather(predict_split(model, loader)))
    if not ranks.is_first:
        return None
    scores = score_classes(predictions.probabilities, predictions.labels, labels)
    low, high = scores["accuracy_interval"]
    correct, split_name = round(scores["accuracy"] * scores["count"]), loader.split.name
    return Classification(
        scores={key: scores[key] for key in ("count", "accuracy", "accuracy_interval", "top5", "ece")},
        sentence=f"{split_name} accuracy {scores['accuracy']:.1%} ({correct:,} of {scores['count']:,}; 95 % interval"
        f" {low:.1%} to {high:.1%})",
        all_scores=scores,
        predictions=predictions,
        labels=labels,
        split=loader.split,
        preprocess=loader.preprocess,
    )
