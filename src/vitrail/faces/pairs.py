"""Lists of pairs in the format of Labeled Faces in the Wild.

    10 300                  ten folds, each of 300 genuine pairs and then 300 impostor pairs; or 300 alone: one fold
    NAME 1 4                the first and the fourth image of a person
    NAME 1 OTHER 2          images of two people

Words are separated by tabs, or by spaces if there is no tab. Image 4 of Ann is the file `Ann_0004.*` or `4.*`; where
files have other names, the fourth file of her folder by name.
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
    """Pairs of images, which are indices of `files`."""

    files: tuple[str, ...]
    """The images that the pairs need, each once."""
    people: tuple[str, ...]
    """The person of each."""
    one: np.ndarray
    other: np.ndarray
    folds: np.ndarray
    """The fold of each pair, from 0."""


def read_pairs(path: Path, images: Mapping[str, Sequence[str]]) -> Pairs:
    """The pairs of a file, where `images` are the sorted files of each person, by `composed` names."""
    text = composed(read_text(path, "Pairs"))
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(lines) < 2:
        raise CorruptFileError(
            path=path, cause="must have a line of folds and pairs and then a line for each pair, got none"
        )
    folds, each = _counts(path, lines[0][1])
    if len(lines) - 1 != 2 * folds * each:
        cause = f"must have 2 x {folds} x {each} pairs, as its first line says, got {len(lines) - 1:,}"
        raise CorruptFileError(path=path, cause=cause)
    files: dict[str, int] = {}
    people: list[str] = []
    ends = np.empty((len(lines) - 1, 2), np.int64)
    for row, (number, line) in enumerate(lines[1:]):
        for side, (person, index) in enumerate(_pair(path, number, line)):
            file = _file(path, number, person, index, images)
            ends[row, side] = files.setdefault(file, len(files))
            if len(files) > len(people):
                people.append(person)
    fold_of = np.arange(len(ends)) // (2 * each)
    return Pairs(tuple(files), tuple(people), ends[:, 0], ends[:, 1], fold_of)


def _words(line: str) -> list[str]:
    return [word.strip() for word in (line.strip().split("\t") if "\t" in line.strip() else line.split())]


def _counts(path: Path, line: str) -> tuple[int, int]:
    words = _words(line)
    if len(words) not in (1, 2) or not all(re.fullmatch(r"[1-9]\d{0,8}", word) for word in words):
        raise CorruptFileError(
            path=path, cause=f"must begin with the numbers of folds and of pairs, got {line.strip()!r}"
        )
    return (1, int(words[0])) if len(words) == 1 else (int(words[0]), int(words[1]))


def _pair(path: Path, number: int, line: str) -> list[tuple[str, int]]:
    match _words(line):
        case [name, one, other] if _is_index(one) and _is_index(other) and int(one) != int(other):
            return [(name, int(one)), (name, int(other))]
        case [name, one, second, other] if _is_index(one) and _is_index(other) and name != second:
            return [(name, int(one)), (second, int(other))]
    rule = "must be NAME I J (two images of a person) or NAME I OTHER J (images of two people)"
    raise CorruptFileError(f"Line {number} of {str(path)!r} {rule}, got {line.strip()!r}.", path=path)


def _is_index(word: str) -> bool:
    return re.fullmatch(r"\d{1,9}", word) is not None and int(word) > 0


def _file(path: Path, number: int, person: str, index: int, images: Mapping[str, Sequence[str]]) -> str:
    where = f"Line {number} of {str(path)!r}"
    if person not in images:
        near = did_you_mean(person, list(images))
        raise UsageError(f"{where} must name a person of the data, got {person!r}.{near}")
    files = images[person]
    numbers = [re.fullmatch(rf"(?:{re.escape(person)}_)?(\d+)", composed(Path(file).stem)) for file in files]
    if any(numbers):
        found = [file for file, match in zip(files, numbers, strict=True) if match and int(match[1]) == index]
    else:
        found = files[index - 1 : index]
    if not found:
        has = pluralise(len(files), "file")
        raise UsageError(f"{where} must name an image that {person!r} has ({has}), got {index}.")
    if len(found) > 1:
        raise UsageError(f"{where} must name one image, got {index} of {person!r}: {found[0]!r} or {found[1]!r}?")
    return found[0]
