"""Find image files by folders, patterns and lists. Files are listed, not read."""

import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.core.errors import UsageError
from vitrail.core.natural_order import natural_key

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
    "HEIC": ("heic", "heif"),  # cannot be decoded; listed so that `data.decode` reports it instead of ignoring photos
}

# Format of each file extension that `data.decode` reads, or explains in an error.
SUFFIXES = {ending: form for form, endings in _ENDINGS.items() for ending in endings}


def is_folder(path: str | Path) -> bool:
    """Return whether a folder exists at this path; False for invalid names."""
    return os.path.isdir(path)  # noqa: PTH112 - Path.is_dir raises for some invalid names


def is_file(path: str | Path, ending: str = "") -> bool:
    """Return whether a regular file with this ending (in any case) exists at this path; False for invalid names."""
    return str(path).lower().endswith(ending) and os.path.isfile(path)  # noqa: PTH113 - as is_dir


def subfolders(folder: str | Path) -> list[str]:
    """Return the names of the folders in a folder, except hidden ones and `__MACOSX`."""
    with os.scandir(folder) as entries:
        return [
            entry.name
            for entry in entries
            if entry.is_dir() and not entry.name.startswith(".") and entry.name != "__MACOSX"
        ]


def list_images(folders: Iterable[str | Path]) -> list[str]:
    """Return all image files under these folders, sorted within each folder.

    Training depends on this order, so names are compared character by character: 10 before 2.
    """
    return [path for folder in folders for path in sorted(_walk_image_files(str(folder), frozenset()))]


def find_images(arguments: Sequence[str], *, stdin: bool = False) -> list[str]:
    """Return the image files that command-line arguments name.

    An argument is a file, a folder of images, or a pattern with `* ? [ ]` or `**`. The files of a folder or pattern are
    sorted as people count: 2 before 10. With `stdin`, the argument `-` means the names on standard input, one per line.
    Missing files on standard input are kept and reported when they are read.
    """
    files: list[str] = []
    for argument in arguments:
        if argument == "-":
            for name in filter(None, _lines_of_stdin() if stdin else ()):
                files += _images_at(name)
            continue
        paths = [argument] if os.path.lexists(argument) else _sort(glob.glob(argument, recursive=True))  # noqa: PTH207
        if not paths and glob.has_magic(argument):
            raise UsageError(f"Pattern must match files or folders, got {argument!r}, which matches none.")
        if not paths:
            raise UsageError(f"Image must be a file or folder that exists, got {argument!r}.")
        images = [image for path in paths for image in _images_at(path)]
        if not images:
            raise UsageError(f"Folder must have images in it, got {argument!r} without any.")
        files += images
    if not files and "-" in arguments:
        raise UsageError("Names of images must come on standard input, one per line, got none.")
    if not files:
        raise UsageError(
            "Images must be given as files, folders or patterns, or names on standard input (-), got none."
        )
    return files


def _images_at(path: str) -> list[str]:
    """Return the sorted image files of a folder; for any other path the path itself."""
    return _sort(list_images([path])) if is_folder(path) else [path]


def _sort(paths: list[str]) -> list[str]:
    return sorted(paths, key=natural_key)


def _lines_of_stdin() -> Iterator[str]:
    """Yield the lines of standard input as file names."""
    return (os.fsdecode(line).rstrip("\r\n") for line in getattr(sys.stdin, "buffer", ()))


def name_images(images: "ImageLike | Iterable[ImageLike]") -> tuple[list[Any], list[str]]:
    """Return all images and their names; folders and patterns are replaced by their files (see `find_images`)."""
    if (shape := getattr(images, "shape", None)) is not None:
        from vitrail.data.sources.arrays import are_paths, pixels_in_memory

        if not are_paths(images):
            if len(shape) < 3 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
                raise UsageError(f"Images must be several, got one array of shape {tuple(shape)}. Put it in brackets.")
            pixels = pixels_in_memory(images)
            return list(pixels), [f"image {number}" for number in range(len(pixels))]
    is_single = isinstance(images, str | bytes | os.PathLike) or not isinstance(images, Iterable)
    sources = [images] if is_single else list(images)
    if all(isinstance(source, str | os.PathLike) for source in sources):
        files = find_images([str(source) for source in sources], stdin=True)
        return files, files
    named_images: list[Any] = []
    names: list[str] = []
    for source in sources:
        if isinstance(source, str | os.PathLike):
            files = find_images([str(source)], stdin=True)
            named_images += files
            names += files
        else:
            names.append(f"image {len(names)}")
            named_images.append(source)
    return named_images, names


def _walk_image_files(folder: str, followed: frozenset[str]) -> Iterator[str]:
    """Yield the image files at any depth. Links to folders are followed, except in cycles."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            is_broken_link = entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110
            if entry.name.rpartition(".")[2].lower() in SUFFIXES and (is_broken_link or entry.is_file()):
                yield entry.path  # reading a broken link raises an error that names it
            elif entry.is_dir():
                if not entry.is_symlink():
                    yield from _walk_image_files(entry.path, followed)
                elif (real := os.path.realpath(entry.path)) not in followed and not _is_inside_folder(folder, real):
                    yield from _walk_image_files(entry.path, followed | {real})


def _is_inside_folder(folder: str, other: str) -> bool:
    """Return whether a folder is `other` or lies below it; `other` has no symbolic links."""
    return (os.path.realpath(folder) + os.sep).startswith(other + os.sep)
