"""From the word a user types for DATA to pictures with labels."""

import csv
import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from vitrail.data.arrays import BUILT_IN, built_in, is_idx_folder, read_idx_folder, read_npz
from vitrail.data.dataset import Dataset, Split
from vitrail.errors import DamagedError, UsageError, did_you_mean

# Endings of the formats that `images.decode` reads, and the format that each promises.
SUFFIXES = {
    "jpg": "JPEG", "jpeg": "JPEG", "jpe": "JPEG", "jfif": "JPEG", "mpo": "JPEG", "png": "PNG", "gif": "GIF",
    "webp": "WEBP", "bmp": "BMP", "tif": "TIFF", "tiff": "TIFF", "ppm": "PPM", "pgm": "PPM", "pbm": "PPM",
    "pnm": "PPM", "avif": "AVIF",
}  # fmt: skip

_SPLIT_NAMES = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test",
    "testing": "test",
}  # fmt: skip
_FILE_COLUMNS = ("file", "path", "filename", "image")


def open_data(data: str | Path) -> Dataset:
    """A class folder, an idx folder, a `.npz`, a `.csv`, or a built-in set. Pictures are listed, not yet read."""
    if isinstance(data, str) and data in BUILT_IN:
        return built_in(data)
    path = Path(data)
    try:
        exists = bool(str(data)) and path.exists()
    except (OSError, ValueError):  # no file can have such a name
        exists = False
    if not exists:
        raise UsageError(
            f"Data must be a folder, a .npz or .csv file, or one of {', '.join(BUILT_IN)}, got {str(data)!r}."
            f"{did_you_mean(str(data), BUILT_IN)}"
        )
    try:
        if path.is_dir():
            return read_idx_folder(path) if is_idx_folder(path) else _read_class_folder(path)
        if not path.is_file():
            raise UsageError(f"Data must be a folder or a regular file, got {str(path)!r}.")
        match path.suffix.lower():
            case ".npz":
                return read_npz(path)
            case ".csv":
                return _read_csv(path)
    except OSError as error:
        raise DamagedError(f"{error.filename or str(path)!r} cannot be read ({error.strerror}).") from None
    raise UsageError(f"Data file must end in .npz or .csv, got {str(path)!r}.")


def list_pictures(folders: Iterable[str | Path]) -> list[str]:
    """Every picture file under some folders, each folder's sorted."""
    return [path for folder in folders for path in sorted(_walk(str(folder), frozenset()))]


def find_pictures(words: Sequence[str], listed: Iterable[str] = ()) -> list[str]:
    """The files that a user names: files, folders by the pictures in them, patterns of * ? [ ] and **. `-` stands for
    the `listed` ones; of those, a missing one is kept, for whoever reads it to name."""
    found: list[str] = []
    for word in words:
        if word == "-":
            for name in filter(None, listed):
                found += list_pictures([name]) if os.path.isdir(name) else [name]  # noqa: PTH112 - any name will do
            continue
        matches = [word] if os.path.lexists(word) else sorted(glob.glob(word, recursive=True))  # noqa: PTH207
        if not matches and glob.has_magic(word):
            raise UsageError(f"Pattern must match files or folders, got {word!r}, which matches none.")
        if not matches:
            raise UsageError(f"Picture must be a file or folder that exists, got {word!r}.")
        inside = [path for match in matches for path in (list_pictures([match]) if Path(match).is_dir() else [match])]
        if not inside:
            raise UsageError(f"Folder must have pictures in it, got {word!r} without any.")
        found += inside
    if not found and "-" in words:
        raise UsageError("Names of pictures must come on standard input, a line each, got none.")
    if not found:
        raise UsageError("Pictures must be given: files, folders, patterns, or names on standard input by -.")
    return found


def _read_class_folder(root: Path) -> Dataset:
    """`root/train/<class>/*` with val, validation or test beside it; or `root/<class>/*`."""
    below = _subfolders(root)
    places = _split_folders(root, below)
    classes = {split: _subfolders(folder) for split, folder in places.items()}
    table = tuple(sorted({name for names in classes.values() for name in names}))
    if not table:
        raise UsageError(
            f"Data folder must have a folder of pictures for each class, got {str(root)!r} without any. See the README"
            " for the layouts."
        )
    if unspeakable := [name for name in table if not _is_text(name)]:
        raise UsageError(f"Class folder must have a name in Unicode, got {unspeakable[0]!r} in {str(root)!r}.")
    number = {name: index for index, name in enumerate(table)}
    splits = {}
    for split in sorted(classes, key=("train", "val", "test", "all").index):
        files: list[str] = []
        labels: list[int] = []
        for name in sorted(classes[split]):
            found = list_pictures([places[split] / name])
            files += found
            labels += [number[name]] * len(found)
        splits[split] = Split(split, files, np.array(labels, np.int64))
    splits = {name: split for name, split in splits.items() if len(split) or name == "train"}
    if not any(len(split) for split in splits.values()):
        raise UsageError(f"Data folder must have pictures in its class folders, got none in {str(root)!r}.")
    listed = {split: {name: str(places[split] / name) for name in sorted(names)} for split, names in classes.items()}
    return Dataset(str(root), table, splits, listed, root=str(root))


def _split_folders(root: Path, below: list[str]) -> dict[str, Path]:
    """Where each split is; `all` is the root itself, if it holds classes and no splits."""
    parts: dict[str, Path] = {}
    for name in below:
        split = _SPLIT_NAMES.get(name.lower())
        if split is None or (not _subfolders(root / name) and list_pictures([root / name])):
            continue  # another folder, or a class that happens to be called so
        if split in parts:
            raise UsageError(
                f"Data folder must have one {split} folder, got {parts[split].name} and {name} in {str(root)!r}."
            )
        parts[split] = root / name
    others = [name for name in below if root / name not in parts.values()]
    if "train" not in parts and others:
        return {"all": root}
    if strange := [name for name in others if list_pictures([root / name])]:
        raise UsageError(
            f"Data folder must have either splits or classes in it, got {parts['train'].name} beside"
            f" {', '.join(map(repr, strange[:3]))}, which have pictures, too, in {str(root)!r}."
        )
    return parts or {"all": root}


def _subfolders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _walk(folder: str, followed: frozenset[str]) -> Iterator[str]:
    """Picture files at any depth. A link to a folder is followed, but never in a circle."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            is_broken_link = entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110
            if entry.name.rpartition(".")[2].lower() in SUFFIXES and (is_broken_link or entry.is_file()):
                yield entry.path  # whoever reads a broken link will name it
            elif entry.is_dir():
                if not entry.is_symlink():
                    yield from _walk(entry.path, followed)
                elif (real := os.path.realpath(entry.path)) not in followed and not _is_inside(folder, real):
                    yield from _walk(entry.path, followed | {real})


def _is_inside(folder: str, other: str) -> bool:
    return (os.path.realpath(folder) + os.sep).startswith(other + os.sep)


def _read_csv(path: Path) -> Dataset:
    """Lines of `file,label` or `file,label,split`, with or without a header; files are relative to the CSV's folder."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file, strict=True), 1) if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedError(f"{str(path)!r} cannot be read as CSV ({error}).") from None
    columns = {"file": 0, "label": 1, "split": 2}
    header = [cell.strip().lower() for cell in rows[0][1]] if rows else []
    if "label" in header or (header[:1] and header[0] in _FILE_COLUMNS):
        spoken = {("file" if name in _FILE_COLUMNS else name): place for place, name in enumerate(header)}
        if not {"file", "label"} <= spoken.keys():
            raise UsageError(f"CSV header must have file and label, got {', '.join(header)} in {str(path)!r}.")
        columns = {"file": spoken["file"], "label": spoken["label"], "split": spoken.get("split", len(header))}
        rows = rows[1:]
    if not rows:
        raise UsageError(f"CSV must have lines of file,label, got none in {str(path)!r}.")
    found: dict[str, list[tuple[str, str]]] = {}
    for number, row in rows:
        cells = {name: row[place].strip() if place < len(row) else "" for name, place in columns.items()}
        if not cells["file"] or not cells["label"]:
            raise DamagedError(
                f"Line {number} of {str(path)!r} must be file,label with a comma, got {','.join(row)!r}."
            )
        split = _SPLIT_NAMES.get(cells["split"].lower()) if cells["split"] else "all"
        if split is None:
            raise DamagedError(
                f"Line {number} of {str(path)!r} must have the split train, val or test, got {cells['split']!r}."
            )
        found.setdefault(split, []).append((str(path.parent / cells["file"]), cells["label"]))
    if "all" in found and len(found) > 1:
        raise DamagedError(f"{str(path)!r} must name a split in every line or in none.")
    table = tuple(sorted({label for pairs in found.values() for _, label in pairs}))
    number_of = {name: index for index, name in enumerate(table)}
    splits = {
        split: Split(
            split,
            [file for file, _ in found[split]],
            np.array([number_of[label] for _, label in found[split]], np.int64),
        )
        for split in ("train", "val", "test", "all")
        if split in found
    }
    return Dataset(str(path), table, splits, root=str(path.parent))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
