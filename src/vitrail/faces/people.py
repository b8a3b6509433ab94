"""People as DATA: one folder a person, split by people, so that those of one split are strangers to the others."""

import dataclasses
from pathlib import Path

import numpy as np

from vitrail.core import rng
from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.files import read_text
from vitrail.core.settings import Bounds
from vitrail.data.dataset import Dataset, Split
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.registry import open_data
from vitrail.faces.align import SIDE
from vitrail.faces.embed import Aligner
from vitrail.faces.gallery import composed

_MOST_BYTES = 2**32  # of aligned faces in memory
_FEWEST = 2  # people of a split: fewer have no pair of strangers


def open_people(data: str | Path) -> tuple[Dataset, Split]:
    """All images of DATA as one split, labelled by person."""
    dataset = open_data(data)
    dataset.check_one_label("Faces")
    parts = list(dataset.splits.values())
    if len(parts) > 1:
        raise UsageError(
            f"Faces must be folders of people without splits (root/<person>/*), got splits {', '.join(dataset.splits)}"
            f" in {str(data)!r}. People are split, not images: put all into one folder."
        )
    return dataset, parts[0]


def merge_spellings(dataset: Dataset, split: Split) -> tuple[Dataset, Split]:
    """The data set with this split alone, where names that differ only in how Unicode spells them are one person, who
    would else be on both sides of a split."""
    labels = tuple(sorted({composed(name) for name in dataset.labels}))
    number = {name: at for at, name in enumerate(labels)}
    place = np.array([number[composed(name)] for name in dataset.labels])
    merged, notes = dataclasses.replace(split, labels=place[split.labels]), dataset.notes
    if twice := len(dataset.labels) - len(labels):
        notes += (f"names that are another one in a second spelling of Unicode: {twice:,} of {len(dataset.labels):,}",)
    return dataclasses.replace(dataset, labels=labels, splits={split.name: merged}, notes=notes), merged


def read_people(path: str | Path, known: tuple[str, ...]) -> list[str]:
    """Names of people from a file, one a line, as `known` spells them."""
    lines = read_text(path, "People").splitlines()
    names = [composed(line.strip()) for line in lines if line.strip()]
    spelled: dict[str, list[str]] = {}
    for name in known:
        spelled.setdefault(composed(name), []).append(name)
    for name in names:
        if name not in spelled:
            like = did_you_mean(name, known)
            raise UsageError(f"People must be folders of DATA, got {name!r} in {str(path)!r}.{like}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"People must be named once, got {twice!r} twice in {str(path)!r}.")
    return [one for name in names for one in spelled[name]]


def take_people(dataset: Dataset, split: Split, names: list[str]) -> tuple[tuple[str, ...], Split]:
    """The images of some people, whose labels count from 0 in the order of their names."""
    chosen = sorted(names)
    number = {dataset.labels.index(name): at for at, name in enumerate(chosen)}
    indices = np.flatnonzero(np.isin(split.labels, list(number)))
    taken = split.select(indices)
    return tuple(chosen), dataclasses.replace(taken, labels=np.array([number[label] for label in taken.labels]))


def split_people(
    data: str | Path, *, people: str | Path | None, test: float, validation: float, seed: int
) -> tuple[Dataset, list[str], list[str]]:
    """Train, val and test of people who are strangers to each other, the names of those in val, and notes.

    The people of the file `people` are for training, all others are the test; without a file, a share `test` of all
    people is drawn. Of the people for training, a share `validation` is held out: choices are made by them. The labels
    of the data set are those of the people who are trained on; others count on from there.
    """
    Bounds(0, 0.9).check("test", test)
    Bounds(0, 0.9).check("validation", validation)
    dataset, every = merge_spellings(*open_people(data))
    present = [dataset.labels[index] for index in np.unique(every.labels)]
    if people is not None:
        own = read_people(people, dataset.labels)
        strangers = sorted(set(present) - set(own))
    else:
        strangers, own = _draw(present, test, seed, stream="people of the test")
    held_out, own = _draw(own, validation, seed, stream="people held out")
    for what, names in (("trained on", own), ("held out", held_out), ("tested", strangers)):
        if (names and len(names) < _FEWEST) or (what == "trained on" and not names):
            raise UsageError(f"People that are {what} must be at least {_FEWEST}, got {len(names)} of {len(present)}.")
    parts, first = {}, 0
    for name, some in (("train", own), ("val", held_out), ("test", strangers)):
        if some:
            _, part = take_people(dataset, every, some)
            if name != "train" and np.bincount(part.labels).max() < 2:
                raise UsageError(
                    f"Some person of the {name} split must have two images, got one of each: no pair to judge."
                )
            parts[name] = dataclasses.replace(part, name=name, labels=part.labels + first)
            first += len(some)
    notes = [f"people: {len(own)} to train on, {len(held_out)} held out, {len(strangers)} for the test; none is in two"]
    return dataclasses.replace(dataset, labels=tuple(sorted(own)), splits=parts, folders={}), held_out, notes


def name_splits(data: str | Path, people: str | Path) -> Dataset:
    """DATA with its own labels: the people of the file as train, all others as test."""
    dataset, every = open_people(data)
    own = read_people(people, dataset.labels)
    if len(own) < _FEWEST or len(dataset.labels) - len(own) == 1:
        raise UsageError(
            f"People must name at least {_FEWEST} to train on and leave none or {_FEWEST} for the test, got"
            f" {len(own)} of {len(dataset.labels)} in {str(people)!r}."
        )
    is_own = np.isin(every.labels, [dataset.labels.index(name) for name in own])
    rows = {"train": np.flatnonzero(is_own), "test": np.flatnonzero(~is_own)}
    return dataclasses.replace(
        dataset, splits={name: every.select(indices, name) for name, indices in rows.items() if len(indices)}
    )


def align_people(dataset: Dataset, landmarks: str | Path, preprocess: Preprocess) -> Dataset:
    """The data set with every face aligned by the landmarks of a file, in memory."""
    count = sum(map(len, dataset.splits.values()))
    if dataset.first_split.in_memory is not None:
        raise UsageError(f"Landmarks must go with image files, got images in memory in {dataset.name!r}.")
    if count * SIDE * SIDE * preprocess.channels > _MOST_BYTES:
        raise UsageError(f"Aligned faces must fit into {_MOST_BYTES // 2**30} GiB of memory, got {count:,} images.")
    aligner, splits = Aligner(Path(landmarks), [dataset.root]), {}
    for name, split in dataset.splits.items():
        faces = [np.asarray(aligner(preprocess.read(path), path)).reshape(SIDE, SIDE, -1) for path in split.images]
        splits[name] = dataclasses.replace(split, images=np.stack(faces))
    return dataclasses.replace(dataset, splits=splits)


def _draw(names: list[str], share: float, seed: int, *, stream: str) -> tuple[list[str], list[str]]:
    """A share of the people, rounded, at least two unless it is 0, and the others."""
    if not share:
        return [], sorted(names)
    keys = rng.bits(seed, np.arange(len(names)), stream=stream)
    order = [sorted(names)[index] for index in np.argsort(keys, kind="stable")]
    count = max(round(share * len(names)), _FEWEST)
    return sorted(order[:count]), sorted(order[count:])
