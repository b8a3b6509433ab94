"""Sorting of prediction rows on disk. Only a score and a position per row are in memory."""

import contextlib
import json
import tempfile
from array import array
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from vitrail.core.errors import VitrailError

Order = Literal["uncertain", "confident"]

_NO_SCORE = 2.0  # above every score: rows without a prediction come last in both orders


class RowStore:
    """Prediction rows in an anonymous temporary file, with their scores and positions in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        self._starts, self._end = array("q"), 0
        self.scores = array("f")
        """Score of each row's first prediction; 2 for a row without predictions."""

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row to the file."""
        line = json.dumps(row).encode() + b"\n"
        self._starts.append(self._end)
        self._end += self._file.write(line)
        predictions = row.get("predictions")
        self.scores.append(predictions[0]["score"] if predictions else _NO_SCORE)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._file.seek(self._starts[index])
        return json.loads(self._file.readline())

    def order(self, by: Order) -> Iterator[int]:
        """Yield the indices of the rows: the least or the most certain first, rows without predictions last.

        Rows with equal scores stay in their order.
        """
        import numpy as np

        scores = np.frombuffer(self.scores, np.float32) if len(self) else np.zeros(0, np.float32)
        keys = np.where(scores == _NO_SCORE, scores, -scores) if by == "confident" else scores
        yield from np.argsort(keys, kind="stable")

    def close(self) -> None:
        """Close the temporary file, which deletes it."""
        self._file.close()


@contextlib.contextmanager
def sort_rows(rows: Iterable[dict[str, Any]], by: Order, folder: Path | None = None) -> Generator[Iterator[dict]]:
    """Yield an iterator over the rows, with the least or the most certain first.

    All rows are read before the first is returned. They are stored in a temporary file in the folder. Raises
    VitrailError if the file cannot be written.
    """
    try:
        store = RowStore(folder)
    except OSError as error:
        raise VitrailError(f"Sorting needs a temporary file, which cannot be created ({error.strerror}).") from None
    with contextlib.closing(store):
        try:
            for row in rows:
                store.add(row)
        except OSError as error:
            raise VitrailError(f"Sorting needs space for a temporary file ({error.strerror}).") from None
        yield (store[index] for index in store.order(by))
