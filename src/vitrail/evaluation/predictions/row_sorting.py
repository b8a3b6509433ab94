"""Rows on disk that are read back in another order; in memory are only numbers."""

import contextlib
import json
import tempfile
from array import array
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from vitrail.core.errors import VitrailError

Order = Literal["uncertain", "confident"]

_NEVER = 2.0  # above every score: an image without an answer comes last in either order


class RowStore:
    """JSON documents in an anonymous temporary file. A number of each is kept in memory, to order them by, and where it
    begins."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        self._starts, self._end = array("q"), 0
        self.scores = array("f")
        """The score of each row's best answer; 2 for a row without one."""

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        line = json.dumps(row).encode() + b"\n"
        self._starts.append(self._end)
        self._end += self._file.write(line)
        predictions = row.get("predictions")
        self.scores.append(predictions[0]["score"] if predictions else _NEVER)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._file.seek(self._starts[index])
        return json.loads(self._file.readline())

    def order(self, by: Order) -> Iterator[int]:
        """Indices of the rows: the least or the most certain first, those without an answer last. Equal ones stay in
        their order."""
        import numpy as np

        scores = np.frombuffer(self.scores, np.float32) if len(self) else np.zeros(0, np.float32)
        keys = np.where(scores == _NEVER, scores, -scores) if by == "confident" else scores
        yield from np.argsort(keys, kind="stable")

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


@contextlib.contextmanager
def sort_rows(rows: Iterable[dict[str, Any]], by: Order, folder: Path | None = None) -> Generator[Iterator[dict]]:
    """The same rows, the least or the most certain first. All of them are read before the first is returned; they are
    kept in a temporary file in the folder."""
    try:
        spool = RowStore(folder)
    except OSError as error:
        raise VitrailError(f"A temporary file must be writable, got none ({error.strerror}).") from None
    with contextlib.closing(spool):
        try:
            for row in rows:
                spool.add(row)
        except OSError as error:
            raise VitrailError(f"Sorting needs room for a temporary file ({error.strerror}).") from None
        yield (spool[index] for index in spool.order(by))
