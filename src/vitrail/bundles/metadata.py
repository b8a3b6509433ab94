"""The metadata of a bundle: all its parts except the weights. Without torch."""

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vitrail.bundles.decision import SINGLE_LABEL, DecisionRule, decision_rule_from_json
from vitrail.bundles.folder import DECISION_RULE_FILE, FILES, check_folder, read_config, reread_if_replaced
from vitrail.core.errors import CorruptFileError, UsageError, first_line
from vitrail.core.files import MANIFEST, read_json, verify_checksums
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ModelConfig

OVERFLOWS = (
    "Output of a model must be finite, got NaN or infinity: its weights are too large. Train or convert it again."
)
"""Error message for weights that are finite, but so large that the output overflows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleInfo:
    """Configuration, preprocessing, labels, provenance and decision rule of a bundle, checked against each other."""

    config: ModelConfig
    preprocess: Preprocess
    labels: tuple[str, ...] | None = None
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict)
    answer: DecisionRule = SINGLE_LABEL
    """Decision rule: how logits become labels."""

    def __post_init__(self) -> None:
        if self.preprocess.resolution != self.config.resolution:
            raise UsageError(
                f"Preprocessing must output images at the model's resolution {self.config.resolution},"
                f" got {self.preprocess.resolution}."
            )
        if self.preprocess.channels != self.config.channels:
            raise UsageError(
                f"Preprocessing must give the model's {self.config.channels} channels, got {self.preprocess.channels}."
            )
        if self.labels is not None:
            object.__setattr__(self, "labels", validate_labels(self.labels, self.config.classes))
        self.answer.check(self.config.classes)
        check_provenance(self.provenance)

    def check_computable(self) -> None:
        """Raise UsageError for a model whose output is neither logits nor features of an image."""
        if self.config.predicts == "pixels":
            raise UsageError("Bundle must have a model that predicts classes, got one that predicts pixels.")

    @property
    def classifies(self) -> bool:
        """Whether the model was trained to classify: it has labels, or the provenance records no other objective."""
        return self.config.classifies and (self.labels is not None or self._objective == "classify")

    @property
    def _objective(self) -> str:
        return self.provenance.get("objective", "classify")

    def check_single_label(self, subject: str) -> None:
        """Raise UsageError unless the model predicts exactly one class. `subject` is the feature that requires it."""
        self.check_classifies()
        if self.answer != SINGLE_LABEL:
            raise UsageError(
                f"{subject} must be used with a bundle that predicts one class per image, got a bundle that predicts"
                " several labels."
            )

    def check_classifies(self) -> None:
        """Raise UsageError for a model that was not trained to classify."""
        if self.classifies:
            return
        if self.config.embedding:
            raise UsageError(
                f"Bundle must have a model that predicts classes, got an embedding of {self.config.embedding}. Use"
                " `vitrail faces`, or fine-tune it first."
            )
        if self._objective != "classify":
            raise UsageError(
                f"Bundle must have been trained to classify, got objective {self._objective!r}. Fine-tune it first, or"
                " judge its features: evaluate it with protocol knn, probe or fewshot."
            )
        raise UsageError(
            f"Bundle must have a model that predicts classes, got one that predicts {self.config.predicts}."
            " Judge its features: evaluate it with protocol knn, probe or fewshot; or write them by `vitrail predict`"
            " with --features."
        )


@reread_if_replaced
def read_bundle_info(path: str | Path, *, weights: bool = True) -> BundleInfo:
    """Read the metadata of the bundle at `path`.

    Every file is verified against the manifest, the weights only if `weights`. Raise CorruptFileError if a file is
    missing, corrupt or invalid.
    """
    folder = check_folder(path)
    config = read_config(folder)
    verify_checksums(folder, [name for name in FILES if weights or name != "model.safetensors"])
    labels, provenance = read_json(folder / "labels.json"), read_json(folder / "provenance.json")
    objective = provenance.get("objective") if isinstance(provenance, dict) else None
    if objective == "features" and config.classes == 1:
        # Version 0.1.0.dev0 gave a model without a head one class and a head of zeros.
        config = config.replace(classes=0)
    try:
        rule: DecisionRule = SINGLE_LABEL  # format 1
        if DECISION_RULE_FILE in read_json(folder / MANIFEST)["files"] or (folder / DECISION_RULE_FILE).exists():
            verify_checksums(folder, [DECISION_RULE_FILE])
            rule = decision_rule_from_json(read_json(folder / DECISION_RULE_FILE))
        return BundleInfo(
            config=config,
            preprocess=Preprocess.from_json(read_json(folder / "preprocess.json")),
            labels=labels,
            provenance=provenance,
            answer=rule,
        )
    except (KeyError, TypeError, ValueError) as error:  # a UsageError is a ValueError
        reason = (
            error if isinstance(error, UsageError) else f"a document has an invalid structure ({first_line(error)})"
        )
        raise CorruptFileError(path=folder, cause=f"is not a valid bundle: {reason}") from None


def check_provenance(provenance: object) -> None:
    """Raise UsageError for a provenance that JSON cannot represent."""
    try:
        is_object = isinstance(provenance, dict) and all(isinstance(key, str) for key in provenance)
        json.dumps(provenance, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        is_object = False
    if not is_object:
        raise UsageError(f"Provenance must be a dictionary that JSON can represent, got {provenance!r}.")


# Surrogates, by which Python represents the bytes of file names that are not UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")


def validate_labels(labels: Iterable[str], classes: int) -> tuple[str, ...]:
    """Return the labels as a tuple. Raise UsageError unless they are unique, not empty, and one for each class."""
    if isinstance(labels, str):
        raise UsageError(f"Labels must be a list of strings, got one string {labels!r}.")
    labels = tuple(labels)
    if len(labels) != classes:
        raise UsageError(f"Labels must be one for each of the model's {classes} classes, got {len(labels)}.")
    seen: set[str] = set()
    for label in labels:
        if not isinstance(label, str) or not label or _SURROGATE.search(label):
            raise UsageError(f"Label must be a string that is not empty, got {label!r}.")
        if label in seen:
            raise UsageError(f"Labels must differ from each other, got {label!r} twice.")
        seen.add(label)
    return labels
