"""Finding image files by folders, patterns and lists. Files are listed, not read."""

import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.core.errors import UsageError

if TYPE_CHECKING:
    from vitrail.data.preprocess import ImageLike

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


def find_images(words: Sequence[str], *, stdin: bool = False) -> list[str]:
    """The files for the user's arguments: files, images in folders, patterns of * ? [ ] and **. With `stdin`, `-` means
    the names on standard input, a line each; missing files among these are kept and reported when they are read."""
    found: list[str] = []
    for word in words:
        if word == "-":
            for name in filter(None, _lines_of_stdin() if stdin else ()):
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


def _lines_of_stdin() -> Iterator[str]:
    return (os.fsdecode(line).rstrip("\r\n") for line in getattr(sys.stdin, "buffer", ()))


def are_image_files(paths: Iterable[str]) -> bool:
    """Whether all paths are files with the ending of an image."""
    return all(path.rpartition(".")[2].lower() in SUFFIXES and is_file(path) for path in paths)


def name_images(images: "ImageLike | Iterable[ImageLike]") -> tuple[list[Any], list[str]]:
    """All images, with folders and patterns replaced by their files (see `find_images`), and the name of each."""
    if (shape := getattr(images, "shape", None)) is not None:
        from vitrail.data.sources.arrays import are_paths, pixels_in_memory

        if not are_paths(images):
            if len(shape) < 3 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
                raise UsageError(f"Images must be several, got one array of shape {tuple(shape)}. Put it in brackets.")
            pixels = pixels_in_memory(images)
            return list(pixels), [f"image {number}" for number in range(len(pixels))]
    is_one = isinstance(images, str | bytes | os.PathLike) or not isinstance(images, Iterable)
    every = [images] if is_one else list(images)
    if all(isinstance(image, str | os.PathLike) for image in every):
        files = find_images([str(image) for image in every], stdin=True)
        return files, files
    chosen: list[Any] = []
    names: list[str] = []
    for image in every:
        if isinstance(image, str | os.PathLike):
            files = find_images([str(image)], stdin=True)
            chosen += files
            names += files
        else:
            names.append(f"image {len(names)}")
            chosen.append(image)
    return chosen, names


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
