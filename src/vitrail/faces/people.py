"""Data sets of faces with one folder per person, and splits by person: nobody has images in two splits."""

import dataclasses
from pathlib import Path

import numpy as np

from vitrail.core import rng
from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.files import read_text
from vitrail.core.settings import Bounds
from vitrail.data.dataset import Dataset, Split
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import AnyData, open_data
from vitrail.faces.align import SIDE
from vitrail.faces.embed import Aligner
from vitrail.faces.gallery import composed

_MAX_BYTES = 2**32  # of aligned faces in memory
_MIN_PEOPLE = 2  # in a split: with fewer, there are no impostor pairs


def open_people(data: AnyData) -> tuple[Dataset, Split]:
    """Open DATA, folders of people, and return it with its only split. Raises UsageError if it has several splits."""
    dataset = open_data(data)
    dataset.check_one_label("Faces")
    parts = list(dataset.splits.values())
    if len(parts) > 1:
        raise UsageError(
            f"Faces must be folders of people without splits (root/<person>/*), got splits {', '.join(dataset.splits)}"
            f" in {str(data)!r}. Images are split by person: put the folders of all people into one folder."
        )
    return dataset, parts[0]


def merge_spellings(dataset: Dataset, split: Split) -> tuple[Dataset, Split]:
    """Return the data set with only this split, where names that are equal in Unicode's NFC are one person.

    Otherwise, images of one person in two spellings could be in two splits.
    """
    labels = tuple(sorted({composed(name) for name in dataset.labels}))
    index_of = {name: index for index, name in enumerate(labels)}
    new_labels = np.array([index_of[composed(name)] for name in dataset.labels])
    merged, notes = dataclasses.replace(split, labels=new_labels[split.labels]), dataset.notes
    if duplicates := len(dataset.labels) - len(labels):
        notes += (
            f"names merged with an equal name in another Unicode form: {duplicates:,} of {len(dataset.labels):,}",
        )
    return dataclasses.replace(dataset, labels=labels, splits={split.name: merged}, notes=notes), merged


def read_people(path: str | Path, labels: tuple[str, ...]) -> list[str]:
    """Read names of people from a text file, one per line, and return them as they are spelled in `labels`.

    Raises UsageError for a name that is not in `labels`.
    """
    lines = read_text(path, "People").splitlines()
    names = [composed(line.strip()) for line in lines if line.strip()]
    spellings: dict[str, list[str]] = {}
    for name in labels:
        spellings.setdefault(composed(name), []).append(name)
    for name in names:
        if name not in spellings:
            suggestion = did_you_mean(name, labels)
            raise UsageError(f"People must be folders of DATA, got {name!r} in {str(path)!r}.{suggestion}")
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"People must be named once, got {duplicate!r} twice in {str(path)!r}.")
    return [label for name in names for label in spellings[name]]


def select_people(dataset: Dataset, split: Split, names: list[str]) -> Split:
    """Return the images of the people with these names. Their labels count from 0 in the order of the sorted names."""
    new_label = {dataset.labels.index(name): label for label, name in enumerate(sorted(names))}
    selected = split.select(np.flatnonzero(np.isin(split.labels, list(new_label))))
    return dataclasses.replace(selected, labels=np.array([new_label[label] for label in selected.labels]))


def split_people(
    data: AnyData, *, people: str | Path | None, test_share: float, validation_share: float, seed: int
) -> tuple[Dataset, list[str], list[str]]:
    """Split DATA by person. Return the data set with train, val and test, the names of the people in val, and notes.

    The people in the file `people` are used for training and all others for the test. Without a file, the people of the
    test are drawn at random, a share `test_share`. Of the people for training, a share `validation_share` is held out
    to select weights and settings: these people are split val. Names that are equal in Unicode's NFC are one person.

    The labels of the data set are the people of train, from 0. The people of val have the next numbers, and those of
    test the numbers after these, so that each number is one person.
    """
    Bounds(0, 0.9).check("test", test_share)
    Bounds(0, 0.9).check("validation", validation_share)
    dataset, images = merge_spellings(*open_people(data))
    present = [dataset.labels[index] for index in np.unique(images.labels)]
    if people is not None:
        trained = read_people(people, dataset.labels)
        tested = sorted(set(present) - set(trained))
    else:
        tested, trained = _draw_people(present, test_share, seed, stream="people of the test")
    held_out, trained = _draw_people(trained, validation_share, seed, stream="people held out")
    for use, names in (("for training", trained), ("held out", held_out), ("for the test", tested)):
        if (names and len(names) < _MIN_PEOPLE) or (use == "for training" and not names):
            raise UsageError(f"People {use} must be at least {_MIN_PEOPLE}, got {len(names)} of {len(present)}.")
    splits, first_label = {}, 0
    for split_name, names in (("train", trained), ("val", held_out), ("test", tested)):
        if names:
            split = select_people(dataset, images, names)
            if split_name != "train" and np.bincount(split.labels).max() < 2:
                raise UsageError(
                    f"At least one person of the {split_name} split must have two images, got one image of each person."
                    " Add a second image of some people: error rates need pairs of images of one person."
                )
            splits[split_name] = dataclasses.replace(split, name=split_name, labels=split.labels + first_label)
            first_label += len(names)
    notes = [
        f"people: {len(trained)} for training, {len(held_out)} held out, {len(tested)} for the test;"
        " nobody is in two splits"
    ]
    return dataclasses.replace(dataset, labels=tuple(sorted(trained)), splits=splits, folders={}), held_out, notes


def name_splits(data: AnyData, people: str | Path) -> Dataset:
    """Return DATA, folders of people, with two splits: train has the people in the file, test all others.

    Unlike `split_people`, all people keep their labels, and spellings are not merged.
    """
    dataset, images = open_people(data)
    trained = read_people(people, dataset.labels)
    if len(trained) < _MIN_PEOPLE or len(dataset.labels) - len(trained) == 1:
        raise UsageError(
            f"People must name at least {_MIN_PEOPLE} for training and leave none or {_MIN_PEOPLE} for the test, got"
            f" {len(trained)} of {len(dataset.labels)} in {str(people)!r}."
        )
    is_trained = np.isin(images.labels, [dataset.labels.index(name) for name in trained])
    rows = {"train": np.flatnonzero(is_trained), "test": np.flatnonzero(~is_trained)}
    return dataclasses.replace(
        dataset, splits={name: images.select(indices, name) for name, indices in rows.items() if len(indices)}
    )


def align_people(dataset: Dataset, landmarks: str | Path, preprocess: Preprocess) -> Dataset:
    """Return the data set with all faces aligned by the landmarks in a file, as arrays in memory."""
    count = sum(map(len, dataset.splits.values()))
    if dataset.first_split.in_memory is not None:
        raise UsageError(f"Landmarks must go with image files, got images in memory in {dataset.name!r}.")
    if count * SIDE * SIDE * preprocess.channels > _MAX_BYTES:
        raise UsageError(f"Aligned faces must fit into {_MAX_BYTES // 2**30} GiB of memory, got {count:,} images.")
    aligner, splits = Aligner(Path(landmarks), [dataset.root]), {}
    for name, split in dataset.splits.items():
        faces = [np.asarray(aligner(preprocess.read(path), path)).reshape(SIDE, SIDE, -1) for path in split.images]
        splits[name] = dataclasses.replace(split, images=np.stack(faces))
    return dataclasses.replace(dataset, splits=splits)


def _draw_people(names: list[str], share: float, seed: int, *, stream: str) -> tuple[list[str], list[str]]:
    """Draw a share of the people at random, at least two unless the share is 0. Return their names and the rest."""
    if not share:
        return [], sorted(names)
    keys = rng.bits(seed, np.arange(len(names)), stream=stream)
    order = [sorted(names)[index] for index in np.argsort(keys, kind="stable")]
    count = max(round(share * len(names)), _MIN_PEOPLE)
    return sorted(order[:count]), sorted(order[count:])
