"""The images of a lab: resized to one resolution and split once for all trials."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.errors import UsageError
from vitrail.core.files import MANIFEST, atomic_folder, read_json, verify_checksums, write_json
from vitrail.data.dataset import Dataset, Split, sample_held_out, sample_per_class
from vitrail.data.preprocess import Preprocess
from vitrail.models import zoo
from vitrail.models.config import ModelConfig
from vitrail.training.starting_point import count_channels

_SIZES = {8: "Pico", 28: "Nano"}  # sides in pixels that have presets; other images are resized
_DEFAULT_SIZE, _DEFAULT_SIDE = "Nano/8", 32
_TEST_SHARE, _VALIDATION_SHARE, _MAX_VALIDATION = 0.2, 0.1, 2000
_TOLERANCE = 0.06  # relative difference in multiply-accumulates between compared families
_PARTS = ("training", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Images:
    """Training, validation and test images of a lab."""

    name: str
    labels: tuple[str, ...]
    size: str
    """Size of the presets for these images: Pico, Nano or Nano/8."""
    training: Split
    validation: Split
    """Images held out of the training images, used to choose learning rates."""
    test: Split
    """Evaluated once for each trained model."""
    fingerprint: str
    notes: tuple[str, ...] = ()

    @property
    def resolution(self) -> tuple[int, int]:
        """Height and width in pixels."""
        height, width = np.asarray(self.test.images).shape[1:3]
        return height, width

    @property
    def channels(self) -> int:
        """Number of channels, 1 or 3."""
        return np.asarray(self.test.images).shape[3]

    @property
    def preprocess(self) -> Preprocess:
        """Preprocessing to pixels from -1 to 1, without cropping."""
        half = (0.5,) * self.channels
        return Preprocess(resolution=self.resolution, mean=half, std=half, crop_fraction=1.0)

    def config(self, size: str, family: str, **changes: Any) -> ModelConfig:
        """Return the preset of a family for these images."""
        settings = {"resolution": list(self.resolution), **changes}
        return zoo.small(size, family).for_data(
            classes=len(self.labels), channels=self.channels, resolution=self.resolution, settings=settings
        )

    def matched_config(self, family: str, size: str | None = None, **changes: Any) -> ModelConfig:
        """Return the preset of a family at the cost of the ViT of this size, then apply `changes`.

        The preset is scaled if its multiply-accumulates differ by more than 6 %. The changes may alter the cost.
        """
        size = size or self.size
        config, target_macs = self.config(size, family), self.config(size, "vit").macs
        if abs(config.macs / target_macs - 1) > _TOLERANCE:
            config = config.with_macs(target_macs)
        if abs(config.macs / target_macs - 1) > _TOLERANCE:
            raise UsageError(f"Family must have the cost of ViT at {self.resolution} px within 6 %, got {family!r}.")
        return config.replace(**changes)

    @property
    def largest(self) -> int:
        """Size of the largest class-balanced subset of the training images."""
        return len(self.labels) * int(np.bincount(self.training.labels, minlength=len(self.labels)).min())

    def subset(self, count: int, seed: int) -> Split:
        """Return a class-balanced subset of `count` training images. Of one seed, larger ones contain smaller ones."""
        indices = sample_per_class(self.training.labels, count // len(self.labels), seed)
        return self.training.select(indices)

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes to compare: 10, 30, 100, ... training images per class, from about 300 in all, and all."""
        classes = len(self.labels)
        ladder = [factor * 10**power * classes for power in range(1, 6) for factor in (1, 3)]
        return (*(n for n in ladder if min(300, self.largest // 4) <= n < 0.7 * self.largest), self.largest)


def prepare(dataset: Dataset, seed: int = 0) -> Images:
    """Return the images of a lab: a data set split into training, validation and test, and resized."""
    notes = []
    dataset.check_one_label("A comparison")
    splits = dict(dataset.splits)
    training = splits.get("train", splits.get("all"))
    if training is None:
        raise UsageError(f"Data to compare on must have a train split, got only {', '.join(splits)}.")
    if len(dataset.labels) < 2:
        raise UsageError(f"Data to compare on must have at least 2 classes, got {len(dataset.labels)}.")
    test = splits.get("test", splits.get("val"))
    if test is None:
        held_out = sample_held_out(training.labels, _TEST_SHARE, seed)
        test, training = training.select(np.flatnonzero(held_out), "test"), training.select(np.flatnonzero(~held_out))
        notes.append(f"{len(test):,} images were held out for the test: DATA has no such split")
    share = min(_VALIDATION_SHARE, _MAX_VALIDATION / len(training))
    held_out = sample_held_out(training.labels, share, seed)
    validation = training.select(np.flatnonzero(held_out), "validation")
    training = training.select(np.flatnonzero(~held_out), "training")
    fewest = np.bincount(training.labels, minlength=len(dataset.labels)).min()
    if fewest < 2 or not len(test) or not len(validation):
        raise UsageError(
            "Data to compare on must have at least 4 images of each class, got a class with"
            f" {fewest} left for training."
        )
    pixels = dataset.first_split.in_memory
    side = pixels.shape[1] if pixels is not None and pixels.shape[1] == pixels.shape[2] else 0
    size, side = (_SIZES[side], side) if side in _SIZES else (_DEFAULT_SIZE, _DEFAULT_SIDE)
    channels = count_channels(dataset.first_split)
    if channels not in (1, 3):
        raise UsageError(f"Data to compare on must have 1 or 3 channels, got {channels}.")
    half = (0.5,) * channels
    preprocess = Preprocess(resolution=(side, side), mean=half, std=half, crop_fraction=1.0)
    if pixels is None or pixels.shape[1:3] != (side, side):
        notes.append(f"images were resized to {side} x {side} px")
    parts = [_resize(split, preprocess) for split in (training, validation, test)]
    return Images(dataset.name, dataset.labels, size, *parts, dataset.fingerprint(), tuple(notes))


def _resize(split: Split, preprocess: Preprocess) -> Split:
    pixels = split.in_memory
    if pixels is None or pixels.shape[1:] != (*preprocess.resolution, preprocess.channels):
        pixels = preprocess.crop_all(split.images)
    return dataclasses.replace(split, images=pixels)


def store(images: Images, folder: Path) -> None:
    """Write the images of a lab to `folder` atomically, for all processes of the lab."""
    with atomic_folder(folder, force=True, owned=True) as temporary:
        for part in _PARTS:
            split: Split = getattr(images, part)
            np.save(temporary / f"{part}.npy", np.ascontiguousarray(split.images))
            np.save(temporary / f"{part}-labels.npy", split.labels)
        metadata = {
            "name": images.name,
            "labels": list(images.labels),
            "size": images.size,
            "notes": list(images.notes),
        }
        write_json(temporary / "about.json", {**metadata, "fingerprint": images.fingerprint})


def restore(folder: Path) -> Images:
    """Read the images that `store` wrote. Pixels are memory-mapped."""
    verify_checksums(folder, [f"{part}{end}.npy" for part in _PARTS for end in ("", "-labels")] + ["about.json"])
    metadata = read_json(folder / "about.json")
    parts = [
        Split(
            part,
            np.load(folder / f"{part}.npy", mmap_mode="r", allow_pickle=False),
            np.load(folder / f"{part}-labels.npy", allow_pickle=False),
        )
        for part in _PARTS
    ]
    labels, notes = tuple(metadata["labels"]), tuple(metadata["notes"])
    return Images(metadata["name"], labels, metadata["size"], *parts, metadata["fingerprint"], notes)


def is_stored(folder: Path) -> bool:
    """Return whether a folder holds stored images."""
    return (folder / MANIFEST).is_file()
