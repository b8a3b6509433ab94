"""`answers.npz`: what a model answered to each image of a data set, kept to compare it with other models later.

images      a key of each image: of its pixels, or of its file's name within the data and the file's bytes
truth       its class
answers     the class that the model chose; -1 for one that the data do not have
scores      the model's probability of its answer, and
own         of the truth
labels      names of the data's classes
data, split the data's name and the split, for people
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
"""Its name in the folder of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedPredictions:
    """Answers of one model to the images of a split."""

    data: str
    split: str
    labels: tuple[str, ...]
    images: np.ndarray
    """Keys of the images, uint64 (n)."""
    truth: np.ndarray
    """Classes of the images (n)."""
    answers: np.ndarray
    """Classes that the model chose, or -1 (n)."""
    scores: np.ndarray
    """Its probabilities of these (n)."""
    own: np.ndarray
    """Its probabilities of the truth (n)."""

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        split: Split,
        indices: np.ndarray,
        probabilities: np.ndarray,
        place: np.ndarray | None = None,
    ) -> Self:
        """From probabilities (n, classes of the model) of the images with these indices. `place` has the model's class
        of each class of the data; None if they are the same."""
        place = np.arange(len(dataset.labels)) if place is None else place
        back = np.full(probabilities.shape[1], -1)
        back[place] = np.arange(len(place))
        truth, rows, said = split.labels[indices], np.arange(len(indices)), probabilities.argmax(axis=1)
        return cls(
            data=dataset.name,
            split=split.name,
            labels=dataset.labels,
            images=split.select(indices).image_keys(dataset.root),
            truth=truth.astype(np.int32),
            answers=back[said].astype(np.int32),
            scores=probabilities[rows, said].astype(np.float32),
            own=probabilities[rows, place[truth]].astype(np.float32),
        )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def right(self) -> np.ndarray:
        """Whether each answer is right (n)."""
        return self.answers == self.truth

    def write(self, path: Path, *, force: bool = False) -> None:
        """Write the file atomically."""
        arrays = {name: getattr(self, name) for name in ("images", "truth", "answers", "scores", "own")}
        texts = {name: np.array(escape_surrogates(getattr(self, name))) for name in ("data", "split")}
        with atomic_file(path, force=force) as file:
            np.savez_compressed(file, labels=np.array(self.labels), **arrays, **texts)

    @classmethod
    def read(cls, path: Path) -> Self:
        """The answers in a file."""
        if not os.path.lexists(path):
            raise UsageError(f"Answers must be a file that exists, got {str(path)!r}.")
        arrays = array_files.read_arrays(path)
        names = ("images", "truth", "answers", "scores", "own", "labels", "data", "split")
        if missing := [name for name in names if name not in arrays]:
            raise CorruptFileError(path=path, cause=f"has no answers: {', '.join(missing)} are missing")
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

    def against(self, other: "SavedPredictions") -> PairedComparison:
        """The paired comparison with another model's answers to the same images."""
        if why := self.difference(other):
            raise UsageError(f"Answers must be to the same images, got {why}.")
        one, two = (np.argsort(kept.images, kind="stable") for kept in (self, other))
        return PairedComparison.of(self.right[one], other.right[two])

    def difference(self, other: "SavedPredictions") -> str | None:
        """How the images of two models differ, in words; None if they are the same with the same labels."""
        if len(self) != len(other) or (np.sort(self.images) != np.sort(other.images)).any():
            common = len(np.intersect1d(self.images, other.images))
            names = [f"{len(kept):,} of {kept.data} ({kept.split})" for kept in (self, other)]
            return f"{names[0]} and {names[1]}, {common:,} in common"
        one, two = (np.argsort(kept.images, kind="stable") for kept in (self, other))
        mine, theirs = np.array(self.labels)[self.truth[one]], np.array(other.labels)[other.truth[two]]
        if differ := int((mine != theirs).sum()):
            return f"the same {len(self):,} images with {differ:,} other labels"
        return None
