"""Labelled images in splits with one common list of classes."""

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from vitrail.core import rng
from vitrail.core.errors import CorruptFileError, UsageError, did_you_mean
from vitrail.core.settings import Bounds
from vitrail.data.decode import read_file, read_size_and_mtime

SPLITS = ("train", "val", "test")


@dataclasses.dataclass(frozen=True)
class Split:
    """Images with their classes."""

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
        """Name of an image in messages: its path, or its split and index."""
        return f"{self.name} image {index}" if self.in_memory is not None else str(self.images[index])

    def fingerprint(self) -> str:
        """A hash that changes with any pixel of images in memory, or with the path, size or time of a file."""
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
        """A hash of the pixels of images in memory, or of the names and sizes of files: the same wherever the files
        are, and whatever splits lie beside them."""
        if self.in_memory is not None:
            return self.fingerprint()
        names = sorted(f"{os.path.basename(path)}\0{_size(path)}\n" for path in self.images)  # noqa: PTH119
        return hashlib.sha256("".join(names).encode(errors="surrogateescape")).hexdigest()

    def image_keys(self, root: str) -> np.ndarray:
        """A number for each image, uint64 (n): a hash of its pixels, or of its path below `root` and its bytes. The
        same image has the same one in a copy of the data."""
        if (pixels := self.in_memory) is not None:
            contents = (np.ascontiguousarray(one).tobytes() for one in pixels)
        else:
            contents = (os.fsencode(os.path.relpath(path, root)) + b"\0" + _bytes(path) for path in self.images)
        digests = b"".join(hashlib.blake2b(content, digest_size=8).digest() for content in contents)
        return np.frombuffer(digests, "<u8")

    def select(self, indices: np.ndarray, name: str | None = None) -> Self:
        """Some of the images, in the order given."""
        pixels = self.in_memory
        images = [self.images[index] for index in indices] if pixels is None else pixels[indices]
        return dataclasses.replace(self, name=name or self.name, images=images, labels=self.labels[indices])

    def sample_evenly(self, count: int) -> Self:
        """At most `count` images, evenly spaced, because files are sorted by class."""
        return self.select(np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(np.int64)))


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set: `splits` has some of train, val and test, or only `all` if it has no splits."""

    name: str
    """Its name as the user gave it."""
    labels: tuple[str, ...]
    """Names of the classes of all splits, sorted."""
    splits: dict[str, Split]
    folders: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """The folder of each class in each split, also of empty ones."""
    root: str = ""
    """Folder of the image files."""
    licence: str = "unknown"
    """Licence of the images, if known."""
    notes: tuple[str, ...] = ()
    """How it was recognised and read, in sentences for the user, where that is not plain from its name."""

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
        """A data set of image files, with path and class (or all labels, as a tuple) of each for every split. `labels`
        are all classes, also those without images."""
        table = tuple(sorted(labels))
        index_of = {label: index for index, label in enumerate(table)}
        splits = {
            split: Split(
                split,
                [path for path, _ in files[split]],
                _indices([label for _, label in files[split]], index_of),
            )
            for split in (*SPLITS, "all")
            if split in files
        }
        return cls(name, table, splits, folders or {}, root=root)

    @property
    def is_multilabel(self) -> bool:
        """Whether images have several labels."""
        return self.first_split.labels.ndim == 2

    def check_one_label(self, what: str) -> None:
        """Refuse data with several labels an image for what needs one class for each."""
        if self.is_multilabel:
            raise UsageError(
                f"{what} must have data with one class for each image, got several labels in {self.name!r}."
            )

    @property
    def first_split(self) -> Split:
        """The first split, used to find out the size and channels of the images."""
        return next(iter(self.splits.values()))

    def for_training(self, *, holdout: float, seed: int, per_class: int | None = None) -> tuple[Split, Split | None]:
        """Training images, at most `per_class` of each class, and validation images: `val`, otherwise a share held out
        of every class first."""
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
        """The given split; otherwise `test`, otherwise `val`, otherwise all images."""
        if split is not None:
            split = "val" if split == "validation" else split
            if split == "all" and len(self.splits) == 1:
                return self.first_split
            if split not in self.splits:
                known = ", ".join(self.splits)
                raise UsageError(f"Split must be one of {known}, got {split!r}.{did_you_mean(split, self.splits)}")
            return self.splits[split]
        return next((self.splits[name] for name in ("test", "val") if name in self.splits), self.first_split)

    def fingerprint(self) -> str:
        """A hash that changes with names, sizes or labels of images (for images in memory, with any pixel)."""
        digest = hashlib.sha256(repr(self.labels).encode())
        for name, split in self.splits.items():
            digest.update(name.encode() + split.labels.astype("<i8").tobytes())
            pixels = split.in_memory
            if pixels is not None:
                digest.update(repr(pixels.shape).encode() + np.ascontiguousarray(pixels).data)
                continue
            for path in split.images:
                digest.update(f"{os.path.relpath(path, self.root)}\0{_size(path)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def missing(self, split: Split) -> list[str]:
        """Classes without an image in the split."""
        return [self.labels[index] for index in np.flatnonzero(self.counts(split) == 0)]

    def counts(self, split: Split) -> np.ndarray:
        """How many images of the split each class has."""
        if split.labels.ndim == 2:
            return split.labels.sum(axis=0, dtype=np.int64)
        return np.bincount(split.labels, minlength=len(self.labels))

    def _check_classes(self, training: Split) -> None:
        if len(self.labels) < 2:
            raise UsageError(
                f"Data to train on must have at least 2 classes, got {list(self.labels)} in {self.name!r}."
            )
        if missing := self.missing(training):
            named = ", ".join(map(repr, missing[:5])) + (", ..." if len(missing) > 5 else "")
            raise CorruptFileError(
                path=self.name,
                cause=f"has no training image of class {named}",
                advice=f"`vitrail doctor {self.name}` says more.",
            )


def _size(path: str) -> int:
    try:
        return read_size_and_mtime(path)[0]
    except (OSError, ValueError):
        return -1


def _indices(labels: Sequence[str | tuple[str, ...]], index_of: Mapping[str, int]) -> np.ndarray:
    """Labels as `Split` has them."""
    if not any(isinstance(label, tuple) for label in labels):
        return np.array([index_of[label] for label in labels if isinstance(label, str)], np.int64)
    table = np.zeros((len(labels), len(index_of)), np.uint8)
    for row, some in zip(table, labels, strict=True):
        row[[index_of[label] for label in some]] = 1
    return table


def _bytes(path: str) -> bytes:
    """The contents of a file; none if it is gone since the model answered, which is no reason to lose the answers."""
    try:
        return read_file(path)
    except (CorruptFileError, UsageError):
        return b""


def sample_held_out(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """True for held-out samples: the share of each class, rounded, at least one but never all. Of samples with several
    labels, the share of all of them, but never all of one label."""
    held_out = np.zeros(len(labels), bool)
    keys = rng.bits(seed, np.arange(len(labels)), stream="held out")
    if labels.ndim == 2:
        left, wanted = labels.sum(axis=0, dtype=np.int64), max(round(share * len(labels)), 1) if share else 0
        for index in np.argsort(keys, kind="stable"):
            if wanted and (left > labels[index]).all(where=labels[index] > 0):
                held_out[index], wanted, left = True, wanted - 1, left - labels[index]
        return held_out
    for members in np.split(order := np.lexsort((keys, labels)), np.flatnonzero(np.diff(labels[order])) + 1):
        wanted = max(round(share * len(members)), 1) if share and len(members) > 1 else 0
        held_out[members[: min(wanted, len(members) - 1)]] = True
    return held_out


def sample_per_class(labels: np.ndarray, count: int, seed: int, *, stream: str = "per class") -> np.ndarray:
    """Indices of `count` samples of each class (or all that it has), sorted. A larger count contains the smaller."""
    keys = rng.bits(seed, np.arange(len(labels)), stream=stream)
    order = np.lexsort((keys, labels))
    first = np.searchsorted(labels[order], labels[order])
    return np.sort(order[np.arange(len(labels)) - first < count])
