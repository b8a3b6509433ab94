"""Corrections of labels: a CSV file whose lines override the labels of single images of DATA.

    file,label
    train/cat/7.jpg,dog
    train/cat/9.jpg,

An empty label leaves the image out. Pages of `evaluate` and `predict` write such files.
"""

import dataclasses
import difflib
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from vitrail.core.errors import CorruptFileError, UsageError, did_you_mean
from vitrail.core.files import escape_surrogates
from vitrail.core.settings import pluralise
from vitrail.data.dataset import AppliedCorrections, Dataset
from vitrail.data.image_files import is_file
from vitrail.data.sources.csv_file import CsvLine, decode_csv, read_csv_lines

_GUARDED = re.compile(r"'+[=+\-@\t\r]")  # text with the apostrophe that keeps spreadsheets from running it as a formula
_MAX_CANDIDATES = 1000  # files that are compared for a suggestion

_Position = tuple[str, int]
"""Split and index of an image."""


def correct_labels(dataset: Dataset, path: str | Path) -> Dataset:
    """Return the data set with the corrections in a CSV file.

    Raise UsageError for a file that is not in the data, or a label that is not one of its classes.
    """
    if not is_file(path):
        raise UsageError(f"Corrections must be a .csv file that exists, got {str(path)!r}.")
    dataset.check_one_label("Corrections")
    try:
        content = Path(path).read_bytes()  # once: the file may change, and the checksum is of what is applied
    except OSError as error:
        raise CorruptFileError(path=path, cause=f"cannot be read ({error.strerror})") from None
    text, _ = decode_csv(Path(path), content)
    is_multilabel, lines = read_csv_lines(Path(path), text)
    if is_multilabel:
        raise UsageError(f"Corrections must have the columns file and label, got labels in {str(path)!r}.")
    labels = {name: split.labels.copy() for name, split in dataset.splits.items()}
    is_kept = {name: np.ones(len(split), bool) for name, split in dataset.splits.items()}
    rows: dict[str, str] = {}
    changed = left_out = 0
    for positions, label in _find_images(dataset, str(path), lines):
        rows[correction_name(dataset, *positions[0])] = label
        for name, index in positions:
            if not label:
                left_out += 1
                is_kept[name][index] = False
            elif dataset.labels[labels[name][index]] != label:
                changed += 1
                labels[name][index] = dataset.labels.index(label)
    splits = {
        name: dataclasses.replace(split, labels=labels[name]).select(np.flatnonzero(is_kept[name]))
        for name, split in dataset.splits.items()
    }
    if empty := [name for name, split in splits.items() if not len(split) and len(dataset.splits[name])]:
        raise UsageError(f"Corrections must leave an image in each split, got none in {empty[0]} with {str(path)!r}.")
    applied = AppliedCorrections(
        path=str(path), sha256=hashlib.sha256(content).hexdigest(), changed=changed, left_out=left_out, rows=rows
    )
    note = f"{Path(path).name}: {pluralise(changed, 'label')} corrected, {pluralise(left_out, 'image')} left out"
    return dataclasses.replace(dataset, splits=splits, notes=(*dataset.notes, note), corrections=applied)


def correction_name(dataset: Dataset, split: str, index: int) -> str:
    """Return the name of an image in a file of corrections: its path relative to DATA, or its split and index."""
    images = dataset.splits[split]
    if images.in_memory is not None:
        return images.image_name(index)
    return relative_name(str(images.images[index]), dataset.root)


def relative_name(path: str, root: str) -> str:
    """Return the path of an image relative to `root`, or the absolute path if there is no root."""
    return os.path.relpath(path, root) if root else os.path.abspath(path)  # noqa: PTH100


def _find_images(dataset: Dataset, path: str, lines: list[CsvLine]) -> Iterator[tuple[list[_Position], str]]:
    """Yield the positions of the image that each line names, and its label. Check both."""
    index = _index_images(dataset)
    line_of: dict[_Position, tuple[int, str]] = {}
    for line in lines:
        file, label = _without_guard(line.file), _without_guard(line.label)
        positions = _look_up(index, dataset, file) or _look_up(index, dataset, file.strip())
        if positions is None:
            raise UsageError(
                f"Line {line.number} of {path!r} must name an image of {dataset.name!r}, relative to it or absolute,"
                f" got {line.file!r}.{_suggest_file(dataset, file)}"
            )
        label = label if label in dataset.labels else label.strip()
        if label and label not in dataset.labels:
            raise UsageError(
                f"Line {line.number} of {path!r} must have a class of {dataset.name!r}, or no label, got"
                f" {line.label!r}.{did_you_mean(label, dataset.labels)}"
            )
        first, first_label = line_of.setdefault(positions[0], (line.number, label))
        if first_label != label:
            raise UsageError(
                f"Line {line.number} of {path!r} must label {line.file!r} as line {first} does, got {line.label!r}."
            )
        if first == line.number:
            yield positions, label


def _index_images(dataset: Dataset) -> Mapping[str, list[_Position]]:
    """Return the positions of each image by its absolute path, or by its name if it is in memory."""
    index: dict[str, list[_Position]] = {}
    for name, split in dataset.splits.items():
        for number in range(len(split)):
            key = split.image_name(number) if split.in_memory is not None else _absolute(str(split.images[number]))
            index.setdefault(key, []).append((name, number))
    return index


def _look_up(index: Mapping[str, list[_Position]], dataset: Dataset, file: str) -> list[_Position] | None:
    """Return the positions of a file that is relative to the folder of the data or to the current one, or absolute."""
    keys = [file, *(_absolute(os.path.join(base, file)) for base in (dataset.root, dataset.name, ""))]  # noqa: PTH118
    return next((index[key] for key in keys if file and key in index), None)


def _absolute(path: str) -> str:
    """Return an absolute path as text without surrogates, because a CSV file has the escaped form of such a path."""
    return escape_surrogates(os.path.abspath(path))  # noqa: PTH100


def _without_guard(text: str) -> str:
    return text[1:] if _GUARDED.match(text) else text


def _suggest_file(dataset: Dataset, file: str) -> str:
    """Return a suggestion for an unknown file: a file of the same name in another folder, or one of its folder."""
    folder, name = os.path.split(file)
    names = [
        correction_name(dataset, split, index)
        for split, images in dataset.splits.items()
        for index in range(len(images))
    ]
    same_name = (other for other in names if os.path.basename(other) == name)  # noqa: PTH119
    same_folder = itertools.islice((other for other in names if os.path.dirname(other) == folder), _MAX_CANDIDATES)  # noqa: PTH120
    suggestion = next(same_name, None) or next(iter(difflib.get_close_matches(file, same_folder, n=1)), None)
    return "" if suggestion is None else f" Did you mean {suggestion!r}?"
