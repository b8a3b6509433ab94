"""`answers.npz`: saved predictions of a model for the images of a split, to compare them with other models later.

images      key of each image: a hash of its pixels, or of its file's name within the data and the file's bytes
truth       true class of each image
answers     predicted class of each image; -1 for a class that the data do not have
scores      the model's probability of the predicted class
own         the model's probability of the true class
labels      names of the data's classes
data, split names of the data and the split
"""

import dataclasses
import os
from pathlib import Path
from typing import Self

import numpy as np

from vitrail.core import array_files
from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import atomic_file, escape_surrogates
from vitrail.data.dataset import Dataset, Split
from vitrail.evaluation.paired import PairedComparison

PREDICTIONS_FILE = "answers.npz"
"""File name of saved predictions in the folder of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPredictions:
    """Predictions of a model for the images of a split."""

    data: str
    split: str
    labels: tuple[str, ...]
    images: np.ndarray
    """Keys of the images, uint64 (n)."""
    truth: np.ndarray
    """True classes (n)."""
    answers: np.ndarray
    """Predicted classes, or -1 for a class that the data do not have (n)."""
    scores: np.ndarray
    """Probabilities of the predicted classes (n)."""
    own: np.ndarray
    """Probabilities of the true classes (n)."""

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        split: Split,
        indices: np.ndarray,
        probabilities: np.ndarray,
        class_indices: np.ndarray | None = None,
    ) -> Self:
        """Create from the probabilities (n, classes of the model) of the images with these indices.

        `class_indices` has the model's class for each class of the data. None if they are the same.
        """
        if class_indices is None:
            class_indices = np.arange(len(dataset.labels))
        data_classes = np.full(probabilities.shape[1], -1)
        data_classes[class_indices] = np.arange(len(class_indices))
        truth, rows, predicted = split.labels[indices], np.arange(len(indices)), probabilities.argmax(axis=1)
        return cls(
            data=dataset.name,
            split=split.name,
            labels=dataset.labels,
            images=split.select(indices).image_keys(dataset.root),
            truth=truth.astype(np.int32),
            answers=data_classes[predicted].astype(np.int32),
            scores=probabilities[rows, predicted].astype(np.float32),
            own=probabilities[rows, class_indices[truth]].astype(np.float32),
        )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def right(self) -> np.ndarray:
        """Whether each prediction is correct (n)."""
        return self.answers == self.truth

    def write(self, path: Path, *, force: bool = False) -> None:
        """Write the file atomically."""
        arrays = {name: getattr(self, name) for name in ("images", "truth", "answers", "scores", "own")}
        texts = {name: np.array(escape_surrogates(getattr(self, name))) for name in ("data", "split")}
        with atomic_file(path, force=force) as file:
            np.savez_compressed(file, labels=np.array(self.labels), **arrays, **texts)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read saved predictions from a file.

        Raises UsageError if it does not exist, and CorruptFileError if it does not contain saved predictions.
        """
        if not os.path.lexists(path):
            raise UsageError(f"Predictions must be a file that exists, got {str(path)!r}.")
        arrays = array_files.read_arrays(path)
        names = ("images", "truth", "answers", "scores", "own", "labels", "data", "split")
        if missing := [name for name in names if name not in arrays]:
            raise CorruptFileError(path=path, cause=f"has no saved predictions: {', '.join(missing)} missing")
        return cls(
            data=str(arrays["data"]),
            split=str(arrays["split"]),
            labels=tuple(arrays["labels"].tolist()),
            images=arrays["images"],
            truth=arrays["truth"],
            answers=arrays["answers"],
            scores=arrays["scores"],
            own=arrays["own"],
        )

    def compare(self, other: "SavedPredictions") -> PairedComparison:
        """Compare with another model's predictions for the same images. Raises UsageError for different images."""
        if difference := self.describe_difference(other):
            raise UsageError(f"Predictions must be for the same images, got {difference}.")
        order, other_order = (np.argsort(saved.images, kind="stable") for saved in (self, other))
        return PairedComparison.of(self.right[order], other.right[other_order])

    def describe_difference(self, other: "SavedPredictions") -> str | None:
        """Describe how the images or labels of two models differ. None if they are the same."""
        if len(self) != len(other) or (np.sort(self.images) != np.sort(other.images)).any():
            common = len(np.intersect1d(self.images, other.images))
            names = [f"{len(saved):,} of {saved.data} ({saved.split})" for saved in (self, other)]
            return f"{names[0]} and {names[1]}, {common:,} in common"
        order, other_order = (np.argsort(saved.images, kind="stable") for saved in (self, other))
        names = np.array(self.labels)[self.truth[order]]
        other_names = np.array(other.labels)[other.truth[other_order]]
        if changed := int((names != other_names).sum()):
            return f"the same {len(self):,} images with {changed:,} different labels"
        return None
