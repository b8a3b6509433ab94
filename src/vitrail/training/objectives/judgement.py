"""Final evaluations of runs, as numbers and arrays; `reports.objectives` shows them."""

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
    """Results of the final evaluation. Its type decides how the report shows it."""

    scores: dict[str, Any]
    """Scores for `metrics.jsonl` and the bundle."""
    sentence: str
    """The line that is printed at the end of the run."""
    summary: tuple[tuple[str, str], ...] = ()
    """The main numbers of the report, with names, unless the report has its own for this type."""

    def to_saved_predictions(self, dataset: Dataset) -> SavedPredictions | None:
        """Return the predictions for each image, to be saved as `RUN/answers.npz`; None if they are not classes."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Judgement):
    """Final evaluation of a classifier."""

    full: dict[str, Any]
    """All scores (see `evaluation.metrics.score`)."""
    answers: SplitPredictions
    labels: tuple[str, ...]
    split: Split
    preprocess: Preprocess

    def to_saved_predictions(self, dataset: Dataset) -> SavedPredictions:
        return SavedPredictions.of(dataset, self.split, self.answers.indices, self.answers.probabilities)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Labelling(Judgement):
    """Final evaluation of a model of several labels."""

    full: dict[str, Any]
    """All scores (see `evaluation.metrics.score_labels`)."""
    split: str
    """Name of the split."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairVerification(Judgement):
    """Final evaluation of an embedding: how well pairs of one person are told from pairs of two."""


def judge_classifier(model: AnyModel, labels: tuple[str, ...], loader: Loader, ranks: Ranks) -> Judgement | None:
    """The final evaluation of a classifier of these labels. All ranks take part; the first one returns the result."""
    answers = SplitPredictions.join(ranks.gather(predict_split(model, loader)))
    if not ranks.is_first:
        return None
    scores = score_classes(answers.probabilities, answers.labels, labels)
    low, high = scores["accuracy_interval"]
    right, name = round(scores["accuracy"] * scores["count"]), loader.split.name
    return Classification(
        scores={key: scores[key] for key in ("count", "accuracy", "accuracy_interval", "top5", "ece")},
        sentence=f"{name} accuracy {scores['accuracy']:.1%} ({right:,} of {scores['count']:,}; 95 % interval"
        f" {low:.1%} to {high:.1%})",
        full=scores,
        answers=answers,
        labels=labels,
        split=loader.split,
        preprocess=loader.preprocess,
    )
