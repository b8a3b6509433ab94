"""Choice of the images on which a bundle is evaluated: if possible, not the images that it was trained on."""

from typing import Any, NamedTuple

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.data.dataset import Dataset, Split

HELD_OUT = "held-out"
"""Name of the split that training holds out of data without a val split."""


class EvaluationSplit(NamedTuple):
    """Images on which a bundle is evaluated."""

    split: Split
    trained_on: bool = False
    """Whether the bundle was trained on some of the images, according to its provenance."""
    notes: tuple[str, ...] = ()
    """Notes for the user on this choice."""

    @property
    def about(self) -> dict[str, Any]:
        """Description of the images, as JSON."""
        return {"split": self.split.name, "trained_on": self.trained_on}


def choose_split(dataset: Dataset, name: str | None, provenance: dict[str, Any]) -> EvaluationSplit:
    """Return the split with this name; by default `test`, `val`, the images that training held out, or all images.

    Raises UsageError if the split does not exist.
    """
    if name == HELD_OUT:
        if not was_trained_on(dataset, provenance) or (divided := training_and_held_out(dataset, provenance)) is None:
            raise UsageError(
                f"Split held-out must be used with the data that the bundle's training held images out of, got"
                f" {dataset.name!r}. Use one of {', '.join(dataset.splits)}."
            )
        return EvaluationSplit(divided[1])
    split = dataset.for_evaluation(name)
    if split.name not in ("train", "all"):
        return EvaluationSplit(split)
    if not was_trained_on(dataset, provenance):
        if provenance.get("training_fingerprint") == split.content_fingerprint():  # photos/train of photos, or a copy
            return EvaluationSplit(split, trained_on=True, notes=(note_on_training_images(),))
        has_changed = str(provenance.get("data", "")).startswith(f"{dataset.name}: ")
        return EvaluationSplit(split, notes=(note_on_changed_data(dataset),) if has_changed else ())
    if name is None and (divided := training_and_held_out(dataset, provenance)) is not None:
        held_out = divided[1]
        return EvaluationSplit(held_out, notes=(note_on_held_out(held_out, f"--split {split.name}: every image"),))
    return EvaluationSplit(split, trained_on=True, notes=(note_on_training_images(),))


def note_if_trained_on(dataset: Dataset, split: Split, provenance: dict[str, Any], bundle: str) -> list[str]:
    """Return a note if the other bundle of a comparison was trained on images of this split."""
    if split.name not in ("train", "all", HELD_OUT) or not was_trained_on(dataset, provenance):
        return []
    divided = training_and_held_out(dataset, provenance)
    return [] if divided is not None and have_same_images(divided[1], split) else [note_on_training_images(bundle)]


def was_trained_on(dataset: Dataset, provenance: dict[str, Any]) -> bool:
    """Return whether a bundle with this provenance was trained on this data."""
    return provenance.get("data_fingerprint") == dataset.fingerprint()


def training_and_held_out(dataset: Dataset, provenance: dict[str, Any]) -> tuple[Split, Split] | None:
    """Divide data without splits into the images that a bundle was trained on and those that its training held out.

    None if no images were held out, or if the provenance does not contain how.
    """
    seed, holdout = provenance.get("seed"), provenance.get("holdout")
    if not isinstance(seed, int) or not isinstance(holdout, float) or not (0 <= seed < 2**63 and 0 < holdout < 1):
        return None
    training, held_out = dataset.for_training(holdout=holdout, seed=seed)
    return None if held_out is None or held_out.name != HELD_OUT else (training, held_out)


def have_same_images(split: Split, other: Split) -> bool:
    """Return whether two splits have the same images in the same order."""
    if split.in_memory is None or other.in_memory is None:
        return list(split.images) == list(other.images)
    return np.array_equal(split.in_memory, other.in_memory)


def note_on_held_out(split: Split, alternative: str = "") -> str:
    """Return a note that only images held out of training are evaluated. `alternative` tells how to select others."""
    hint = f" ({alternative})" if alternative else ""
    return f"the bundle was trained on this data: only the {len(split):,} images held out are evaluated{hint}"


def note_on_training_images(bundle: str = "the bundle") -> str:
    """Return a warning that scores on training images are higher than on new images."""
    return f"{bundle} was trained on these images or some of them: expect lower scores on new images"


def note_on_changed_data(dataset: Dataset) -> str:
    """Return a warning that images may be training images, because the bundle was trained on data of this name."""
    return f"the bundle was trained on {dataset.name!r} as it was before: some of these images may be training images"
