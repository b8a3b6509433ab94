"""Opening DATA, whatever its form."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from vitrail.data.base import Source
from vitrail.data.built_in import Digits, Fashion40, FashionMnist
from vitrail.data.files import is_file
from vitrail.data.folders import ClassFolder
from vitrail.data.idx import IdxFolder
from vitrail.data.npz import NpzFile
from vitrail.data.tables import CsvFile
from vitrail.errors import DamagedError, UsageError, did_you_mean

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

# The first that recognises DATA opens it: words before paths, special folders before any folder.
SOURCES: tuple[Source, ...] = (
    FashionMnist(),
    Fashion40(),
    Digits(),
    CsvFile(),
    NpzFile(),
    IdxFolder(),
    ClassFolder(),
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


def describe_sources() -> str:
    """All forms of DATA in one phrase, from the most general source to the most specific one."""
    *some, last = (source.description for source in reversed(SOURCES))
    return f"{', '.join(some)} or {last}"
