"""Choosing the images that a bundle is evaluated on: not those that it was trained on, where its provenance tells."""

from typing import Any, NamedTuple

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.data.dataset import Dataset, Split

HELD_OUT = "held-out"
"""Name of the images that training held out of data without a val split."""


class EvaluationSplit(NamedTuple):
    """Images to evaluate a bundle on."""

    split: Split
    trained_on: bool = False
    """Whether the bundle was trained on images among them, as far as its provenance says."""
    notes: tuple[str, ...] = ()
    """What the user should know about this choice."""

    @property
    def about(self) -> dict[str, Any]:
        """Description of the images, as JSON."""
        return {"split": self.split.name, "trained_on": self.trained_on}


def choose_split(dataset: Dataset, name: str | None, provenance: dict[str, Any]) -> EvaluationSplit:
    """The split of this name; otherwise `test`, `val`, the images that the bundle's training held out, or all."""
    if name == HELD_OUT:
        if not was_trained_on(dataset, provenance) or (parts := training_and_held_out(dataset, provenance)) is None:
            raise UsageError(
                f"Split held-out must come with the data that the bundle's training held images out of, got"
                f" {dataset.name!r}. Use one of {', '.join(dataset.splits)}."
            )
        return EvaluationSplit(parts[1])
    chosen = dataset.for_evaluation(name)
    if chosen.name not in ("train", "all"):
        return EvaluationSplit(chosen)
    if not was_trained_on(dataset, provenance):
        if provenance.get("training_fingerprint") == chosen.content_fingerprint():  # photos/train of photos, or a copy
            return EvaluationSplit(chosen, trained_on=True, notes=(note_on_training_images(),))
        has_changed = str(provenance.get("data", "")).startswith(f"{dataset.name}: ")
        return EvaluationSplit(chosen, notes=(note_on_changed_data(dataset),) if has_changed else ())
    if name is None and (parts := training_and_held_out(dataset, provenance)) is not None:
        return EvaluationSplit(parts[1], notes=(note_on_held_out(parts[1], f"--split {chosen.name}: every image"),))
    return EvaluationSplit(chosen, trained_on=True, notes=(note_on_training_images(),))


def note_if_trained_on(dataset: Dataset, split: Split, provenance: dict[str, Any], bundle: str) -> list[str]:
    """A note if another bundle, to which this split is given, was trained on images among them."""
    if split.name not in ("train", "all", HELD_OUT) or not was_trained_on(dataset, provenance):
        return []
    parts = training_and_held_out(dataset, provenance)
    return [] if parts is not None and have_same_images(parts[1], split) else [note_on_training_images(bundle)]


def was_trained_on(dataset: Dataset, provenance: dict[str, Any]) -> bool:
    """Whether a bundle was trained on this data."""
    return provenance.get("data_fingerprint") == dataset.fingerprint()


def training_and_held_out(dataset: Dataset, provenance: dict[str, Any]) -> tuple[Split, Split] | None:
    """The images of this data that a bundle was trained on, and those held out. None if there are none, or if the
    provenance does not tell."""
    seed, holdout = provenance.get("seed"), provenance.get("holdout")
    if not isinstance(seed, int) or not isinstance(holdout, float) or not (0 <= seed < 2**63 and 0 < holdout < 1):
        return None
    training, held_out = dataset.for_training(holdout=holdout, seed=seed)
    return None if held_out is None or held_out.name != HELD_OUT else (training, held_out)


def have_same_images(one: Split, other: Split) -> bool:
    """Whether two splits have the same images in the same order."""
    if one.in_memory is None or other.in_memory is None:
        return list(one.images) == list(other.images)
    return np.array_equal(one.in_memory, other.in_memory)


def note_on_held_out(split: Split, others: str = "") -> str:
    """A note that only images held out of training are evaluated; `others` says how to get other images."""
    also = f" ({others})" if others else ""
    return f"the bundle was trained on this data: only the {len(split):,} images held out are evaluated{also}"


def note_on_training_images(bundle: str = "the bundle") -> str:
    """A warning that scores on training images do not tell about new ones."""
    return f"{bundle} was trained on these images or some of them: expect lower scores on new ones"


def note_on_changed_data(dataset: Dataset) -> str:
    """A warning that images may be training images, because data of this name was trained on."""
    return f"the bundle was trained on {dataset.name!r} as it was before: some of these images may be training images"
