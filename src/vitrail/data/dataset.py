"""Labelled images in splits with one common list of classes."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from vitrail.core import rng
from vitrail.core.errors import CorruptFileError, UsageError, did_you_mean
from vitrail.core.files import escape_surrogates
from vitrail.core.settings import Bounds
from vitrail.data.decode import read_file, read_size_and_mtime

SPLITS = ("train", "val", "test")


@dataclasses.dataclass(frozen=True)
class Split:
    """Images of a split of a data set, with their classes."""

    name: str
    images: Sequence[str] | np.ndarray
    """Paths of files, or pixels in memory: uint8 (n, height, width, channels)."""
    labels: np.ndarray
    """Class indices (n); or, if images have several labels, 1 for each label of an image and 0 for others: uint8
    (n, classes)."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def in_memory(self) -> np.ndarray | None:
        """The pixels, if they are in memory."""
        return self.images if isinstance(self.images, np.ndarray) else None

    def image_name(self, index: int) -> str:
        """Return the name of an image in messages: its path, or its split and index."""
        return f"{self.name} image {index}" if self.in_memory is not None else str(self.images[index])

    def fingerprint(self) -> str:
        """Return a hash of the pixels in memory, or of the path, size and modification time of every file."""
        digest = hashlib.sha256()
        if (pixels := self.in_memory) is not None:
            digest.update(repr(pixels.shape).encode() + np.ascontiguousarray(pixels).data)
            return digest.hexdigest()
        for path in self.images:
            try:
                stamp = "{} {}".format(*read_size_and_mtime(path))
            except (OSError, ValueError):
                stamp = "missing"
            digest.update(f"{os.path.abspath(path)}\0{stamp}\n".encode(errors="surrogateescape"))  # noqa: PTH100
        return digest.hexdigest()

    def content_fingerprint(self) -> str:
        """Return a hash of the pixels in memory, or of the names and sizes of the files.

        It does not depend on the folder of the files or on other splits.
        """
        if self.in_memory is not None:
            return self.fingerprint()
        names = sorted(f"{os.path.basename(path)}\0{_file_size(path)}\n" for path in self.images)  # noqa: PTH119
        return hashlib.sha256("".join(names).encode(errors="surrogateescape")).hexdigest()

    def image_keys(self, root: str) -> np.ndarray:
        """Return a 64-bit hash of each image, uint64 (n): of its pixels, or of its path below `root` and its bytes.

        A copy of the data has the same keys.
        """
        if (pixels := self.in_memory) is not None:
            contents = (np.ascontiguousarray(image).tobytes() for image in pixels)
        else:
            contents = (
                os.fsencode(os.path.relpath(path, root)) + b"\0" + _read_bytes_if_present(path) for path in self.images
            )
        digests = b"".join(hashlib.blake2b(content, digest_size=8).digest() for content in contents)
        return np.frombuffer(digests, "<u8")

    def select(self, indices: np.ndarray, name: str | None = None) -> Self:
        """Return the images at these indices, in this order."""
        pixels = self.in_memory
        images = [self.images[index] for index in indices] if pixels is None else pixels[indices]
        return dataclasses.replace(self, name=name or self.name, images=images, labels=self.labels[indices])

    def sample_evenly(self, count: int) -> Self:
        """Return at most `count` images, evenly spaced. Files are sorted by class, so every class is covered."""
        return self.select(np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(np.int64)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppliedCorrections:
    """A file of corrections that was applied to a data set."""

    path: str
    """Path of the file."""
    sha256: str
    """Checksum of the file."""
    changed: int
    """Number of images with another label than in DATA."""
    left_out: int
    """Number of images that were left out."""
    rows: Mapping[str, str]
    """Label of each image in the file, by its name relative to DATA; an empty label leaves the image out."""

    def to_json(self) -> dict[str, Any]:
        """Return the corrections for the provenance of a bundle, without the rows."""
        file = escape_surrogates(os.path.basename(self.path))  # noqa: PTH119
        return {"file": file, "sha256": self.sha256, "changed": self.changed, "left_out": self.left_out}


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A labelled data set of images. `splits` has train, val or test; or only `all` if the data have no splits."""

    name: str
    """Name or path as the user typed it."""
    labels: tuple[str, ...]
    """Sorted names of the classes of all splits."""
    splits: dict[str, Split]
    folders: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Folder of each class in each split, including empty classes."""
    root: str = ""
    """Folder of the image files."""
    licence: str = "unknown"
    """Licence of the images, if known."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: how the data were recognised and read, where the name does not show it."""
    corrections: AppliedCorrections | None = None
    """Corrections of labels, if a file of them was applied."""

    @classmethod
    def from_files(
        cls,
        name: str,
        files: Mapping[str, Sequence[tuple[str, str | tuple[str, ...]]]],
        labels: Iterable[str],
        *,
        folders: dict[str, dict[str, str]] | None = None,
        root: str,
    ) -> Self:
        """Build a data set of image files.

        `files` maps a split to pairs of a path and its class, or its tuple of labels. `labels` are all classes,
        including classes without images. `folders` has the folder of each class in each split, if there are such
        folders. `root` is the folder of the image files.
        """
        sorted_labels = tuple(sorted(labels))
        index_of = {label: index for index, label in enumerate(sorted_labels)}
        splits = {
            split: Split(
                split,
                [path for path, _ in files[split]],
                _encode_labels([label for _, label in files[split]], index_of),
            )
            for split in (*SPLITS, "all")
            if split in files
        }
        return cls(name, sorted_labels, splits, folders or {}, root=root)

    @property
    def is_multilabel(self) -> bool:
        """Whether an image can have several labels."""
        return self.first_split.labels.ndim == 2

    def check_one_label(self, subject: str) -> None:
        """Raise UsageError if images have several labels. `subject` begins the message."""
        if self.is_multilabel:
            raise UsageError(
                f"{subject} must have data with one class for each image, got several labels in {self.name!r}."
            )

    @property
    def first_split(self) -> Split:
        """First split; it shows the size and channels of the images."""
        return next(iter(self.splits.values()))

    def for_training(self, *, holdout: float, seed: int, per_class: int | None = None) -> tuple[Split, Split | None]:
        """Return the training images, at most `per_class` of each class, and the validation images.

        Validation images are the split `val`. Without it, a share `holdout` of each class is held out of the training
        images before `per_class` applies.
        """
        Bounds(0, below=1).check("holdout", holdout)
        training = self.splits.get("train", self.splits.get("all"))
        if training is None:
            raise UsageError(f"Data to train on must have a train split, got only {', '.join(self.splits)}.")
        self._check_classes(training)
        validation = self.splits.get("val")
        if per_class is not None:
            self.check_one_label("Training on some images of each class")
        held_out = sample_held_out(training.labels, 0.0 if validation is not None else holdout, seed)
        if held_out.any():
            validation = training.select(np.flatnonzero(held_out), "held-out")
            training = training.select(np.flatnonzero(~held_out))
        if per_class is not None:
            training = training.select(sample_per_class(training.labels, per_class, seed))
        return dataclasses.replace(training, name="train"), validation

    def for_evaluation(self, split: str | None = None) -> Split:
        """Return the split of this name; by default `test`, otherwise `val`, otherwise all images."""
        if split is not None:
            split = "val" if split == "validation" else split
            if split == "all" and len(self.splits) == 1:
                return self.first_split
            if split not in self.splits:
                names = ", ".join(self.splits)
                raise UsageError(f"Split must be one of {names}, got {split!r}.{did_you_mean(split, self.splits)}")
            return self.splits[split]
        return next((self.splits[name] for name in ("test", "val") if name in self.splits), self.first_split)

    def fingerprint(self) -> str:
        """Return a hash of the labels and of the names and sizes of the files, or of the pixels in memory."""
        digest = hashlib.sha256(repr(self.labels).encode())
        for name, split in self.splits.items():
            digest.update(name.encode() + split.labels.astype("<i8").tobytes())
            pixels = split.in_memory
            if pixels is not None:
                digest.update(repr(pixels.shape).encode() + np.ascontiguousarray(pixels).data)
                continue
            for path in split.images:
                name = os.path.relpath(path, self.root)
                digest.update(f"{name}\0{_file_size(path)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def missing(self, split: Split) -> list[str]:
        """Return the classes without an image in the split."""
        return [self.labels[index] for index in np.flatnonzero(self.counts(split) == 0)]

    def counts(self, split: Split) -> np.ndarray:
        """Return the number of images of each class in the split."""
        if split.labels.ndim == 2:
            return split.labels.sum(axis=0, dtype=np.int64)
        return np.bincount(split.labels, minlength=len(self.labels))

    def _check_classes(self, training: Split) -> None:
        """Raise an error if there are fewer than two classes, or a class has no training image."""
        if len(self.labels) < 2:
            raise UsageError(
                f"Data to train on must have at least 2 classes, got {list(self.labels)} in {self.name!r}."
            )
        if missing := self.missing(training):
            names = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise CorruptFileError(
                path=self.name,
                cause=f"has no training image of class {names}",
                advice=f"Run `vitrail doctor {self.name}` for details.",
            )


def _file_size(path: str) -> int:
    """Return the size of a file in bytes, or -1 if it is missing."""
    try:
        return read_size_and_mtime(path)[0]
    except (OSError, ValueError):
        return -1


def _encode_labels(labels: Sequence[str | tuple[str, ...]], index_of: Mapping[str, int]) -> np.ndarray:
    """Return class indices (n), or a table (n, classes) of 0 and 1 if any image has a tuple of labels."""
    if not any(isinstance(label, tuple) for label in labels):
        return np.array([index_of[label] for label in labels if isinstance(label, str)], np.int64)
    table = np.zeros((len(labels), len(index_of)), np.uint8)
    for row, names in zip(table, labels, strict=True):
        row[[index_of[name] for name in names]] = 1
    return table


def _read_bytes_if_present(path: str) -> bytes:
    """Return the bytes of a file, or b"" if it was deleted after the prediction: predictions must not be lost."""
    try:
        return read_file(path)
    except (CorruptFileError, UsageError):
        return b""


def sample_held_out(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return a mask of held-out samples.

    From each class, `share` is held out, rounded, at least one sample but never all. If samples have several labels,
    `share` of all samples is held out, but never all samples of one label.
    """
    held_out = np.zeros(len(labels), bool)
    keys = rng.bits(seed, np.arange(len(labels)), stream="held out")
    if labels.ndim == 2:
        training_counts = labels.sum(axis=0, dtype=np.int64)
        count = max(round(share * len(labels)), 1) if share else 0
        for index in np.argsort(keys, kind="stable"):
            if count and (training_counts > labels[index]).all(where=labels[index] > 0):
                held_out[index], count, training_counts = True, count - 1, training_counts - labels[index]
        return held_out
    for members in np.split(order := np.lexsort((keys, labels)), np.flatnonzero(np.diff(labels[order])) + 1):
        count = max(round(share * len(members)), 1) if share and len(members) > 1 else 0
        held_out[members[: min(count, len(members) - 1)]] = True
    return held_out


def sample_per_class(labels: np.ndarray, count: int, seed: int, *, stream: str = "per class") -> np.ndarray:
    """Return the sorted indices of `count` samples of each class, or of all its samples if it has fewer.

    A larger count includes the samples of a smaller one.
    """
    keys = rng.bits(seed, np.arange(len(labels)), stream=stream)
    order = np.lexsort((keys, labels))
    first = np.searchsorted(labels[order], labels[order])
    return np.sort(order[np.arange(len(labels)) - first < count])
