"""Lists of pairs in the format of Labeled Faces in the Wild.

    10 300                  ten folds, each of 300 genuine pairs and then 300 impostor pairs; or 300 alone: one fold
    NAME 1 4                the first and the fourth image of a person
    NAME 1 OTHER 2          images of two people

Fields are separated by tabs, or by spaces if the line has no tab. Image 4 of Ann is the file `Ann_0004.*` or `4.*`. If
the files of her folder have no numbers, it is the fourth file in the order of the names.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitrail.core.errors import CorruptFileError, UsageError, did_you_mean
from vitrail.core.files import read_text
from vitrail.core.settings import pluralise
from vitrail.faces.gallery import composed


class Pairs(NamedTuple):
    """Pairs of face images from a list of pairs."""

    files: tuple[str, ...]
    """The images of the pairs, each image once."""
    people: tuple[str, ...]
    """The person in each image of `files`."""
    first: np.ndarray
    """Index of the first image of each pair in `files`."""
    second: np.ndarray
    """Index of the second image of each pair in `files`."""
    folds: np.ndarray
    """The fold of each pair, from 0."""


def read_pairs(path: Path, images: Mapping[str, Sequence[str]]) -> Pairs:
    """Read a list of pairs. `images` maps each person's name, as `composed` returns it, to the sorted files.

    Raises CorruptFileError for a line in another format, UsageError for a person or an image that is not in `images`.
    """
    text = composed(read_text(path, "Pairs"))
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) < 2:
        raise CorruptFileError(
            path=path, cause="must have a line with the numbers of folds and pairs and then one line per pair, got none"
        )
    folds, fold_pairs = _parse_counts(path, lines[0][1])
    if len(lines) - 1 != 2 * folds * fold_pairs:
        cause = f"must have 2 x {folds} x {fold_pairs} pairs, as its first line says, got {len(lines) - 1:,}"
        raise CorruptFileError(path=path, cause=cause)
    files: dict[str, int] = {}
    people: list[str] = []
    ends = np.empty((len(lines) - 1, 2), np.int64)
    for row, (number, line) in enumerate(lines[1:]):
        for side, (person, index) in enumerate(_parse_pair(path, number, line)):
            file = _find_image(path, number, person, index, images)
            ends[row, side] = files.setdefault(file, len(files))
            if len(files) > len(people):
                people.append(person)
    fold_of = np.arange(len(ends)) // (2 * fold_pairs)
    return Pairs(tuple(files), tuple(people), ends[:, 0], ends[:, 1], fold_of)


def _split_fields(line: str) -> list[str]:
    return [field.strip() for field in (line.strip().split("\t") if "\t" in line.strip() else line.split())]


def _parse_counts(path: Path, line: str) -> tuple[int, int]:
    """Return the number of folds and the number of genuine pairs per fold from the first line."""
    fields = _split_fields(line)
    if len(fields) not in (1, 2) or not all(re.fullmatch(r"[1-9]\d{0,8}", field) for field in fields):
        raise CorruptFileError(
            path=path, cause=f"must begin with the numbers of folds and of pairs, got {line.strip()!r}"
        )
    return (1, int(fields[0])) if len(fields) == 1 else (int(fields[0]), int(fields[1]))


def _parse_pair(path: Path, number: int, line: str) -> list[tuple[str, int]]:
    """Return the person and the image number of both images of a pair."""
    match _split_fields(line):
        case [name, first, second] if _is_index(first) and _is_index(second) and int(first) != int(second):
            return [(name, int(first)), (name, int(second))]
        case [name, first, other_name, second] if _is_index(first) and _is_index(second) and name != other_name:
            return [(name, int(first)), (other_name, int(second))]
    rule = "must be NAME I J (two images of a person) or NAME I OTHER J (images of two people)"
    raise CorruptFileError(f"Line {number} of {str(path)!r} {rule}, got {line.strip()!r}.", path=path)


def _is_index(field: str) -> bool:
    return re.fullmatch(r"\d{1,9}", field) is not None and int(field) > 0


def _find_image(path: Path, number: int, person: str, index: int, images: Mapping[str, Sequence[str]]) -> str:
    """Return the file of a person's image by its number, for line `number` of the list of pairs."""
    line = f"Line {number} of {str(path)!r}"
    if person not in images:
        suggestion = did_you_mean(person, list(images))
        raise UsageError(f"{line} must name a person of the data, got {person!r}.{suggestion}")
    files = images[person]
    numbers = [re.fullmatch(rf"(?:{re.escape(person)}_)?(\d+)", composed(Path(file).stem)) for file in files]
    if any(numbers):
        matches = [file for file, match in zip(files, numbers, strict=True) if match and int(match[1]) == index]
    else:
        matches = files[index - 1 : index]
    if not matches:
        count = pluralise(len(files), "file")
        raise UsageError(f"{line} must name an image that {person!r} has ({count}), got {index}.")
    if len(matches) > 1:
        raise UsageError(f"{line} must name one image, got {index} of {person!r}: {matches[0]!r} or {matches[1]!r}?")
    return matches[0]
