"""Opening DATA, whatever its form."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from vitrail.core.errors import CorruptFileError, UsageError, did_you_mean
from vitrail.core.registry import Registry
from vitrail.data.image_files import is_file, is_folder, list_images
from vitrail.data.sources.base import Source

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset, Split

SOURCES: Registry[type[Source]] = Registry(
    "source",
    {
        "fashion-mnist": "vitrail.data.sources.built_in:FashionMnist",
        "fashion-40": "vitrail.data.sources.built_in:Fashion40",
        "digits": "vitrail.data.sources.built_in:Digits",
        "csv": "vitrail.data.sources.csv_file:CsvFile",
        "npz": "vitrail.data.sources.npz:NpzFile",
        "idx": "vitrail.data.sources.idx:IdxFolder",
        "archive": "vitrail.data.sources.archives:ArchiveFile",
        "cifar": "vitrail.data.sources.cifar:Cifar",
        "tiny-imagenet": "vitrail.data.sources.published:TinyImageNet",
        "imagenet-validation": "vitrail.data.sources.published:ImageNetValidation",
        "oxford-pets": "vitrail.data.sources.published:OxfordPets",
        "oxford-flowers": "vitrail.data.sources.published:OxfordFlowers",
        "folder": "vitrail.data.sources.folders:ClassFolder",
    },
    base="vitrail.data.sources.base:Source",
)
"""Data sources by name (see `data.sources.base`). The first that recognises DATA opens it: words before paths, special
folders before any folder, which is the last."""


def all_sources() -> Iterator[Source]:
    """Every source, in the order in which they are asked. Those of other packages are asked before the source of any
    folder, and imported only if it comes to that."""
    *special, general = _built_in(SOURCES)
    yield from special
    yield from (SOURCES[name]() for name in SOURCES.extension_names)
    yield general


@functools.cache
def _built_in(sources: Registry[type[Source]]) -> tuple[Source, ...]:
    return tuple(sources[name]() for name in sources.built_in_names)


AnyData: TypeAlias = Union[str, Path, "Dataset", tuple[Any, Any], Mapping[str, Any]]
"""What `open_data` opens: a name or a path, a `Dataset`, or data in memory (see `dataset_in_memory`)."""


def open_data(data: AnyData) -> "Dataset":
    """The data set of a name or a path (see `SOURCES`), or of arrays. A `Dataset` is returned unchanged."""
    from vitrail.data.dataset import Dataset

    if isinstance(data, Dataset):
        return data
    if not isinstance(data, str | Path):
        from vitrail.data.sources.arrays import dataset_in_memory

        return dataset_in_memory(data)
    with _told_in_a_line(data):
        if (source := _find_source(data)) is not None:
            return source.open(data)
    words = [source.word for source in all_sources() if source.word]
    if not os.path.lexists(data):
        near = did_you_mean(str(data), [*words, *_siblings(data)])
        raise UsageError(
            f"Data must be a file or folder that exists, or a built-in data set ({', '.join(sorted(words))}), got"
            f" {str(data)!r}.{near}"
        )
    where = "" if is_file(data) else ", where there is no folder and no regular file"
    raise UsageError(f"Data must be {describe_sources()}, got {str(data)!r}{where}.")


def _siblings(path: str | Path) -> list[str]:
    """Paths of the folder in which a path would be, written as the user wrote it."""
    folder, name = os.path.split(path)
    try:
        return [os.path.join(folder, entry) for entry in os.listdir(folder or ".")] if name else []  # noqa: PTH118, PTH208
    except (OSError, ValueError):
        return []


def open_named_split(words: Sequence[str], split: str | None = None) -> "Split | None":
    """The images of a data set, if the words name one; None if they name files and folders. A path comes before a
    built-in name, and without a `split` any folder is a folder of files."""
    for word in words:
        is_path = os.path.lexists(word)
        asked = (source for source in all_sources() if not (source.word and is_path))
        source = next((source for source in asked if source.recognises(word)), None)
        if source is None or (source.is_folder_of_files and split is None):
            continue
        if len(words) > 1:
            raise UsageError(f"A data set must be given alone, got {word!r} beside {len(words) - 1:,} others.")
        with _told_in_a_line(word):
            return source.open_images(word, split)
    if split is not None:
        raise UsageError(f"--split must come with one data set, got {', '.join(map(repr, words[:3]))}.")
    return None


def open_images(data: AnyData) -> "Dataset":
    """As `open_data`, for those who can do without labels: a folder of images, none of them in folders of their own, is
    a data set without classes."""
    from vitrail.data.dataset import Dataset

    if isinstance(data, str | Path):
        with _told_in_a_line(data):
            source = _find_source(data)
            is_any_folder = source is not None and source.is_folder_of_files
            files = list_images([data]) if is_any_folder else []
        if is_any_folder and not files:
            raise UsageError(f"Data must have images, got the folder {str(data)!r} without any.")
        loose = [file for file in files if Path(file).parent == Path(data)]
        if loose and len(loose) == len(files):
            return Dataset(str(data), (), {"all": _unlabelled(files)}, root=str(data))
        if loose:
            note = f"{len(loose):,} images beside the folders in {str(data)!r} are left out"
            return dataclasses.replace(found := open_data(data), notes=(*found.notes, note))
    return open_data(data)


def sample_images(data: AnyData, count: int) -> list[Any]:
    """At most `count` images, evenly spaced, of a data set or of any folder of images."""
    is_any_folder = isinstance(data, str | Path) and is_folder(data)
    files = list_images([data]) if is_any_folder else []
    split = _unlabelled(files) if files else open_data(data).for_evaluation(None)
    return list(split.sample_evenly(count).images)


def _unlabelled(files: list[str]) -> "Split":
    import numpy as np

    from vitrail.data.dataset import Split

    return Split("all", files, np.zeros(len(files), np.int64))


def _find_source(data: str | Path) -> Source | None:
    return next((source for source in all_sources() if source.recognises(data)), None)


@contextlib.contextmanager
def _told_in_a_line(data: str | Path) -> Generator[None]:
    """Errors of the system, as when a folder cannot be read, become ours."""
    try:
        yield
    except OSError as error:
        raise CorruptFileError(path=error.filename or str(data), cause=f"cannot be read ({error.strerror})") from None


def describe_sources() -> str:
    """All forms of DATA in one phrase, from the most general source to the most specific one. Sources of other packages
    are listed by name, because the help must not import them."""
    built_in = (source.description for source in reversed(_built_in(SOURCES)))
    *others, last = (*built_in, *(f"DATA of the extension source.{name}" for name in SOURCES.extension_names))
    return f"{', '.join(others)} or {last}"
