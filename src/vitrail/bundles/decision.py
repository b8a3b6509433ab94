"""Decision rules: how logits become labels. Each bundle stores one.

`SingleLabel` (softmax) chooses the best classes, `MultiLabel` (sigmoid) every label above its threshold. A bundle with
`SingleLabel` has format 1 and no file for the rule. Other bundles have format 2 and `answer.json`: older versions of
vitrail would apply softmax to their logits, so they must not read them.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULT_TOP_K = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecisionRule(ABC):
    """How logits become probabilities, and which labels a prediction has."""

    kind: ClassVar[str]
    equation: ClassVar[str]
    """Probabilities p as a function of logits l, in plain text."""
    python_code: ClassVar[str]
    """Line of Python that computes `scores` from the array `logits` of one image."""
    no_label: ClassVar[str] = ""
    """Text shown when no label reaches its threshold. Empty if every prediction has a label."""

    @abstractmethod
    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        """Convert logits to probabilities."""

    @abstractmethod
    def scores(self, logits_K: np.ndarray) -> np.ndarray:
        """Convert the logits of one image to probabilities with numpy."""

    @abstractmethod
    def choose(self, scores_K: np.ndarray, top_k: int | None, threshold: float | None) -> np.ndarray:
        """Return the indices of the predicted classes, best first. None means the rule's default."""

    @abstractmethod
    def decide(self, logits_BK: np.ndarray) -> np.ndarray:
        """Return one row of integers for each image: its class, or 0 or 1 for each label.

        Predictions are equal if their rows are equal.
        """

    def check_threshold(self, threshold: float) -> None:
        """Raise UsageError for a threshold that is not a probability or that the rule cannot apply."""
        Bounds(0, 1).check("threshold", threshold)

    def check(self, classes: int) -> None:  # noqa: B027 - most rules have no settings
        """Raise UsageError if the settings do not fit the number of classes."""

    def to_json(self) -> dict[str, Any]:
        """Return the kind and the settings."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleLabel(DecisionRule):
    """Each image has exactly one class: softmax."""

    kind = "class"
    equation = "p_k = e^(l_k) / (sum_j e^(l_j))"
    python_code = "scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()"

    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        return logits_BK.softmax(-1)

    def scores(self, logits_K: np.ndarray) -> np.ndarray:
        shares_K = np.exp(logits_K - logits_K.max())
        return shares_K / shares_K.sum()

    def choose(self, scores_K: np.ndarray, top_k: int | None, threshold: float | None) -> np.ndarray:
        return np.argsort(-scores_K, kind="stable")[: _DEFAULT_TOP_K if top_k is None else top_k]

    def decide(self, logits_BK: np.ndarray) -> np.ndarray:
        return logits_BK.argmax(axis=1)[:, None]

    def check_threshold(self, threshold: float) -> None:
        raise UsageError(
            "Threshold must be used with a bundle that predicts several labels, got one that predicts one class."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiLabel(DecisionRule):
    """Each image has any number of labels: sigmoid, and a threshold for each label."""

    kind = "labels"
    equation = "p_k = 1 / (1 + e^(-l_k))"
    python_code = "scores = 1 / (1 + np.exp(-logits))"
    no_label = "(no label)"

    thresholds: tuple[float, ...]
    """Lowest probability of each label at which it is predicted."""

    def __post_init__(self) -> None:
        if not isinstance(self.thresholds, list | tuple):
            raise UsageError(f"Thresholds must be a list of probabilities, got {self.thresholds!r}.")
        for threshold in self.thresholds:
            Bounds(0, 1).check("thresholds", threshold)
        object.__setattr__(self, "thresholds", tuple(map(float, self.thresholds)))

    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        return logits_BK.sigmoid()

    def scores(self, logits_K: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-np.clip(logits_K.astype(np.float64), -700, 700)))

    def choose(self, scores_K: np.ndarray, top_k: int | None, threshold: float | None) -> np.ndarray:
        thresholds = self.thresholds if threshold is None else threshold
        best_first = np.argsort(-scores_K, kind="stable")
        return best_first[(scores_K >= thresholds)[best_first]][:top_k]

    def decide(self, logits_BK: np.ndarray) -> np.ndarray:
        return (self.scores(logits_BK) >= np.asarray(self.thresholds)).astype(np.int64)

    def check(self, classes: int) -> None:
        if len(self.thresholds) != classes:
            raise UsageError(
                f"Thresholds must be one for each of the model's {classes} classes, got {len(self.thresholds)}."
            )


DECISION_RULES: dict[str, type[DecisionRule]] = {rule.kind: rule for rule in (SingleLabel, MultiLabel)}

SINGLE_LABEL = SingleLabel()


def decision_rule_from_json(document: Any) -> DecisionRule:
    """Read the result of `DecisionRule.to_json`. Raise KeyError, TypeError or ValueError for other documents."""
    fields = dict(document)
    return DECISION_RULES[fields.pop("kind")](**fields)
