"""Registry of data sources, and functions that open DATA of any form."""

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
"""Data sources by name (see `data.sources.base`). The first source that recognises DATA opens it. So names come before
paths, and the layouts of published data sets before the general folder of classes, which is last."""


def all_sources() -> Iterator[Source]:
    """Yield every source in the order of precedence.

    Sources of other packages come just before the general folder of classes, and are imported only when reached.
    """
    *special, class_folder = _built_in_sources(SOURCES)
    yield from special
    yield from (SOURCES[name]() for name in SOURCES.extension_names)
    yield class_folder


@functools.cache
def _built_in_sources(sources: Registry[type[Source]]) -> tuple[Source, ...]:
    """Create the built-in sources in the order of precedence."""
    return tuple(sources[name]() for name in sources.built_in_names)


@dataclasses.dataclass(frozen=True)
class CorrectedData:
    """DATA with a file of corrections of its labels (see `data.corrections`)."""

    data: "AnyData"
    corrections: str | Path

    def __str__(self) -> str:
        return str(self.data)


AnyData: TypeAlias = Union[str, Path, "Dataset", CorrectedData, tuple[Any, Any], Mapping[str, Any]]
"""DATA as `open_data` takes it: a name or a path, a `Dataset`, or data in memory (see `dataset_in_memory`)."""


def with_corrections(data: AnyData, corrections: str | Path | None) -> AnyData:
    """Return DATA with a file of corrections; unchanged if there is none."""
    return data if corrections is None else CorrectedData(data, corrections)


def data_arguments(data: AnyData) -> tuple[str, ...]:
    """Return the arguments of the command line that name DATA: none for data in memory."""
    if isinstance(data, CorrectedData):
        arguments = data_arguments(data.data)
        return (*arguments, "--corrections", str(data.corrections)) if arguments else ()
    return (str(data),) if isinstance(data, str | Path) else ()


def open_data(data: AnyData) -> "Dataset":
    """Open a data set by name or path (see `SOURCES`) or from arrays. A `Dataset` is returned unchanged."""
    from vitrail.data.dataset import Dataset

    if isinstance(data, CorrectedData):
        from vitrail.data.corrections import correct_labels

        return correct_labels(open_data(data.data), data.corrections)

    if isinstance(data, Dataset):
        return data
    if not isinstance(data, str | Path):
        from vitrail.data.sources.arrays import dataset_in_memory

        return dataset_in_memory(data)
    with _convert_os_errors(data):
        if (source := _find_source(data)) is not None:
            return source.open(data)
    names = [source.word for source in all_sources() if source.word]
    if not os.path.lexists(data):
        suggestion = did_you_mean(str(data), [*names, *_sibling_paths(data)])
        raise UsageError(
            f"Data must be a file or folder that exists, or a built-in data set ({', '.join(sorted(names))}), got"
            f" {str(data)!r}.{suggestion}"
        )
    reason = "" if is_file(data) else ", which is neither a folder nor a regular file"
    raise UsageError(f"Data must be {describe_sources()}, got {str(data)!r}{reason}.")


def _sibling_paths(path: str | Path) -> list[str]:
    """Return the paths in the parent folder of a missing path, in the user's spelling, for suggestions."""
    folder, name = os.path.split(path)
    try:
        return [os.path.join(folder, entry) for entry in os.listdir(folder or ".")] if name else []  # noqa: PTH118, PTH208
    except (OSError, ValueError):
        return []


def open_named_split(arguments: Sequence[str], split: str | None = None) -> "Split | None":
    """Return the images of a data set if the arguments name one, or None if they name files and folders.

    A path comes before a built-in name. Without a `split`, a folder of image files is not a data set.
    """
    for argument in arguments:
        is_path = os.path.lexists(argument)
        sources = (source for source in all_sources() if not (source.word and is_path))
        source = next((source for source in sources if source.recognises(argument)), None)
        if source is None or (source.is_folder_of_files and split is None):
            continue
        if len(arguments) > 1:
            raise UsageError(f"A data set must be given alone, got {argument!r} and {len(arguments) - 1:,} others.")
        with _convert_os_errors(argument):
            return source.open_images(argument, split)
    if split is not None:
        raise UsageError(f"--split must be used with one data set, got {', '.join(map(repr, arguments[:3]))}.")
    return None


def open_images(data: AnyData) -> "Dataset":
    """Open a data set like `open_data`, but labels are optional.

    A folder with images and no folders of images becomes a data set without classes.
    """
    from vitrail.data.dataset import Dataset

    if isinstance(data, str | Path):
        with _convert_os_errors(data):
            source = _find_source(data)
            is_any_folder = source is not None and source.is_folder_of_files
            files = list_images([data]) if is_any_folder else []
        if is_any_folder and not files:
            raise UsageError(f"Data must have images, got the folder {str(data)!r} without any.")
        loose = [file for file in files if Path(file).parent == Path(data)]
        if loose and len(loose) == len(files):
            return Dataset(str(data), (), {"all": _unlabelled_split(files)}, root=str(data))
        if loose:
            note = f"{len(loose):,} images beside the folders in {str(data)!r} are left out"
            dataset = open_data(data)
            return dataclasses.replace(dataset, notes=(*dataset.notes, note))
    return open_data(data)


def sample_images(data: AnyData, count: int) -> list[Any]:
    """Return at most `count` evenly spaced images of a data set or of any folder of images."""
    is_any_folder = isinstance(data, str | Path) and is_folder(data)
    files = list_images([data]) if is_any_folder else []
    split = _unlabelled_split(files) if files else open_data(data).for_evaluation(None)
    return list(split.sample_evenly(count).images)


def _unlabelled_split(files: list[str]) -> "Split":
    """Build a split of image files without labels. Every image gets class 0."""
    import numpy as np

    from vitrail.data.dataset import Split

    return Split("all", files, np.zeros(len(files), np.int64))


def _find_source(data: str | Path) -> Source | None:
    """Return the first source that recognises DATA."""
    return next((source for source in all_sources() if source.recognises(data)), None)


@contextlib.contextmanager
def _convert_os_errors(data: str | Path) -> Generator[None]:
    """Context in which OSError becomes a CorruptFileError that names the file."""
    try:
        yield
    except OSError as error:
        raise CorruptFileError(path=error.filename or str(data), cause=f"cannot be read ({error.strerror})") from None


def source_descriptions() -> list[str]:
    """Return a description of each form of DATA, from the most general source to the most specific.

    Sources of other packages are listed by name, because `--help` must not import them.
    """
    built_in = (source.description for source in reversed(_built_in_sources(SOURCES)))
    return [*built_in, *(f"DATA of the extension source.{name}" for name in SOURCES.extension_names)]


def describe_sources() -> str:
    """Describe all forms of DATA in one phrase."""
    *descriptions, last = source_descriptions()
    return f"{', '.join(descriptions)} or {last}"
