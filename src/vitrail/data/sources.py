"""Opening DATA, whatever its form."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from vitrail.data.archives import ArchiveFile
from vitrail.data.base import Source
from vitrail.data.built_in import Digits, Fashion40, FashionMnist
from vitrail.data.cifar import Cifar
from vitrail.data.files import is_file, is_folder, list_images, subfolders
from vitrail.data.folders import ClassFolder
from vitrail.data.idx import IdxFolder
from vitrail.data.npz import NpzFile
from vitrail.data.published import ImageNetValidation, OxfordFlowers, OxfordPets, TinyImageNet
from vitrail.data.tables import CsvFile
from vitrail.data.tree import Layout
from vitrail.errors import DamagedError, UsageError, did_you_mean

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset, Split

# What a folder may be, on disk or in an archive: published data sets before any folder.
LAYOUTS: tuple[Layout, ...] = (
    Cifar(),
    TinyImageNet(),
    ImageNetValidation(),
    OxfordPets(),
    OxfordFlowers(),
    ClassFolder(),
)

# The first that recognises DATA opens it: words before paths, special folders before any folder.
SOURCES: tuple[Source, ...] = (
    FashionMnist(),
    Fashion40(),
    Digits(),
    CsvFile(),
    NpzFile(),
    IdxFolder(),
    ArchiveFile(LAYOUTS),
    *LAYOUTS,
)


AnyData: TypeAlias = Union[str, Path, "Dataset", tuple[Any, Any], Mapping[str, Any]]
"""What `open_data` opens: a name or a path, a `Dataset`, or data in memory (see `data.arrays.dataset_in_memory`)."""


def open_data(data: AnyData) -> "Dataset":
    """The data set of a name or a path (see `SOURCES`), or of arrays. A `Dataset` is returned unchanged."""
    from vitrail.data.dataset import Dataset

    if isinstance(data, Dataset):
        return data
    if not isinstance(data, str | Path):
        from vitrail.data.arrays import dataset_in_memory

        return dataset_in_memory(data)
    try:
        for source in SOURCES:
            if source.recognises(data):
                return source.open(data)
    except OSError as error:
        raise DamagedError(path=error.filename or str(data), cause=f"cannot be read ({error.strerror})") from None
    near = did_you_mean(str(data), filter(None, (source.word for source in SOURCES)))
    where = "" if is_file(data) else ", where there is no folder and no regular file"
    raise UsageError(f"Data must be {describe_sources()}, got {str(data)!r}{where}.{near}")


def find_split(words: Sequence[str], split: str | None = None) -> "Split | None":
    """The images of a data set, if the words name one; None if they name files and folders. A path comes before a
    built-in name, and without a `split` any folder is a folder of files."""
    for word in words:
        known = [source for source in SOURCES if not (source.word and os.path.lexists(word))]
        source = next((source for source in known if source.recognises(word)), None)
        if source is None or (source.is_folder_of_files and split is None):
            continue
        if len(words) > 1:
            raise UsageError(f"A data set must be given alone, got {word!r} beside {len(words) - 1:,} others.")
        try:
            return source.open_images(word, split)
        except OSError as error:
            raise DamagedError(path=error.filename or word, cause=f"cannot be read ({error.strerror})") from None
    if split is not None:
        raise UsageError(f"--split must come with one data set, got {', '.join(map(repr, words[:3]))}.")
    return None


def open_images(data: AnyData) -> "Dataset":
    """As `open_data`, for those who can do without labels: a folder of images that are not sorted into classes is a
    data set without any."""
    is_plain = isinstance(data, str | Path) and is_folder(data) and not subfolders(data)
    if not is_plain or not (files := list_images([data])):
        return open_data(data)
    import numpy as np

    from vitrail.data.dataset import Dataset, Split

    return Dataset(str(data), (), {"all": Split("all", files, np.zeros(len(files), np.int64))}, root=str(data))


def some_images(data: AnyData, count: int) -> list[Any]:
    """At most `count` images, evenly spaced, of a data set or of any folder of images."""
    return list(open_images(data).for_evaluation(None).spread(count).images)


def describe_sources() -> str:
    """All forms of DATA in one phrase, from the most general source to the most specific one."""
    *some, last = (source.description for source in reversed(SOURCES))
    return f"{', '.join(some)} or {last}"
