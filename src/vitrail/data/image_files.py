"""Finding image files by folders, patterns and lists. Files are listed, not read."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vitrail.core.errors import UsageError

_ENDINGS = {
    "JPEG": ("jpg", "jpeg", "jpe", "jfif", "mpo"),
    "PNG": ("png",),
    "GIF": ("gif",),
    "WEBP": ("webp",),
    "BMP": ("bmp",),
    "TIFF": ("tif", "tiff"),
    "PPM": ("ppm", "pgm", "pbm", "pnm"),
    "AVIF": ("avif",),
    "HEIC": ("heic", "heif"),  # listed, so that no photo is left out silently; `data.decode` says what to do
}

# Endings of the formats that `data.decode` reads or explains, and the format that each promises.
SUFFIXES = {ending: form for form, endings in _ENDINGS.items() for ending in endings}


def is_folder(path: str | Path) -> bool:
    """Whether a folder exists at a path; False for invalid names."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for some of them


def is_file(path: str | Path, ending: str = "") -> bool:
    """Whether a regular file with this extension (in any case) exists at a path; False for invalid names."""
    return str(path).lower().endswith(ending) and os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for some


def subfolders(folder: str | Path) -> list[str]:
    """Names of the folders in a folder, without hidden ones and those that macOS adds to archives."""
    with os.scandir(folder) as entries:
        return [
            entry.name
            for entry in entries
            if entry.is_dir() and not entry.name.startswith(".") and entry.name != "__MACOSX"
        ]


def list_images(folders: Iterable[str | Path]) -> list[str]:
    """All image files under some folders, sorted within each folder."""
    return [path for folder in folders for path in sorted(_walk(str(folder), frozenset()))]


def find_images(words: Sequence[str], listed: Iterable[str] = ()) -> list[str]:
    """The files for the user's arguments: files, images in folders, patterns of * ? [ ] and **. `-` stands for the
    `listed` ones; missing files among these are kept and reported when they are read."""
    found: list[str] = []
    for word in words:
        if word == "-":
            for name in filter(None, listed):
                found += list_images([name]) if is_folder(name) else [name]
            continue
        matches = [word] if os.path.lexists(word) else sorted(glob.glob(word, recursive=True))  # noqa: PTH207
        if not matches and glob.has_magic(word):
            raise UsageError(f"Pattern must match files or folders, got {word!r}, which matches none.")
        if not matches:
            raise UsageError(f"Image must be a file or folder that exists, got {word!r}.")
        inside = [path for match in matches for path in (list_images([match]) if is_folder(match) else [match])]
        if not inside:
            raise UsageError(f"Folder must have images in it, got {word!r} without any.")
        found += inside
    if not found and "-" in words:
        raise UsageError("Names of images must come on standard input, a line each, got none.")
    if not found:
        raise UsageError("Images must be given: files, folders, patterns, or names on standard input by -.")
    return found


def _walk(folder: str, followed: frozenset[str]) -> Iterator[str]:
    """Image files at any depth. Links to folders are followed, except in cycles."""
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
