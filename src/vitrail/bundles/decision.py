"""What a model's logits answer: one class for an image, or any number of labels. Stored in the bundle.

Each kind is one class: how logits become probabilities, and what of them a prediction names. A bundle that answers with
one class has format 1 and no document of this; others have format 2 and `answer.json`, because an older version would
read their logits as one class.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.core.settings import Bounds

if TYPE_CHECKING:
    from torch import Tensor

_TOP = 5  # classes that are named by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer(ABC):
    """One kind of answer."""

    kind: ClassVar[str]
    equation: ClassVar[str]
    """How probabilities p follow from logits l, in plain text."""
    program: ClassVar[str]
    """The same as a line of Python: `scores` from the array `logits` of an image."""
    nothing: ClassVar[str] = ""
    """What stands for a prediction that names nothing, if that can be."""

    @abstractmethod
    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        """Logits as probabilities."""

    @abstractmethod
    def scores(self, logits_K: np.ndarray) -> np.ndarray:
        """The same for one image, without torch."""

    @abstractmethod
    def chosen(self, scores_K: np.ndarray, top_k: int | None, threshold: float | None) -> np.ndarray:
        """Indices of the classes that a prediction names, best first."""

    @abstractmethod
    def decide(self, logits_BK: np.ndarray) -> np.ndarray:
        """The answers to compare with others' or with the truth: one row of integers for each image."""

    def check_threshold(self, threshold: float | None) -> None:
        """Refuse a threshold where there is none, or that is no probability."""
        if threshold is not None:
            Bounds(0, 1).check("threshold", threshold)

    def check(self, classes: int) -> None:  # noqa: B027 - most kinds have no settings
        """Refuse settings that do not fit a model of so many classes."""

    def to_json(self) -> dict[str, Any]:
        """The kind and its settings."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneClass(Answer):
    """Exactly one of the classes: softmax."""

    kind = "class"
    equation = "p_k = e^(l_k) / (sum_j e^(l_j))"
    program = "scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()"

    def probabilities(self, logits_BK: "Tensor") -> "Tensor":
        return logits_BK.softmax(-1)

    def scores(self, logits_K: np.ndarray) -> np.ndarray:
        shares_K = np.exp(logits_K - logits_K.max())
        return shares_K / shares_K.sum()

    def chosen(self, scores_K: np.ndarray, top_k: int | None, threshold: float | None) -> np.ndarray:
        return np.argsort(-scores_K, kind="stable")[: _TOP if top_k is None else top_k]

    def decide(self, logits_BK: np.ndarray) -> np.ndarray:
        return logits_BK.argmax(axis=1)[:, None]

    def check_threshold(self, threshold: float | None) -> None:
        if threshold is not None:
            raise UsageError("Threshold must be for a bundle that answers with several labels, got one of one class.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeveralLabels(Answer):
    """Each label by itself: sigmoid, and a threshold for each label."""

    kind = "labels"
    equation = "p_k = 1 / (1 + e^(-l_k))"
    program = "scores = 1 / (1 + np.exp(-logits))"
    nothing = "(no label)"

    thresholds: tuple[float, ...]
    """A label is named if its probability is at least this."""

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

    def chosen(self, scores_K: np.ndarray, top_k: int | None, threshold: float | None) -> np.ndarray:
        least = self.thresholds if threshold is None else threshold
        order = np.argsort(-scores_K, kind="stable")
        return order[(scores_K >= least)[order]][:top_k]

    def decide(self, logits_BK: np.ndarray) -> np.ndarray:
        return (self.scores(logits_BK) >= np.asarray(self.thresholds)).astype(np.int64)

    def check(self, classes: int) -> None:
        if len(self.thresholds) != classes:
            raise UsageError(
                f"Thresholds must be one for each of the model's {classes} classes, got {len(self.thresholds)}."
            )


ANSWERS: dict[str, type[Answer]] = {kind.kind: kind for kind in (OneClass, SeveralLabels)}

ONE_CLASS = OneClass()


def answer_from_json(document: Any) -> Answer:
    """The answer that `to_json` wrote. Another document raises KeyError, TypeError or ValueError."""
    fields = dict(document)
    return ANSWERS[fields.pop("kind")](**fields)
