"""Tables of answers: one row for each image, written as soon as it is known. A format is one class and one line of
`FORMATS`.

Columns are `file`, `truth` if it is known, `label`, `score`, `label_2`, `score_2`, ..., and `error` for an image that
could not be read. JSON lines are what `predict --json` prints.
"""

import codecs
import contextlib
import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.files import atomic_file, check_writable, escape_surrogates, refuse_existing
from vitrail.core.optional import import_extra
from vitrail.core.terminal import json_text

PredictionRow = dict[str, Any]
"""`{"file", "predictions": [{"label", "score"}, ...]}`, perhaps with "truth"; or `{"file", "error"}`."""


class PredictionTable(ABC):
    """A file of answers that is being written. `best` is how many answers a row has at most, `truth` whether the right
    ones are known."""

    ending: ClassVar[str]
    """The ending of its file names."""

    package: ClassVar[str] = ""
    """What it needs besides vitrail, of the extra of its name."""

    @classmethod
    def check(cls) -> None:
        """Refuse to begin if its package is missing."""
        if cls.package:
            import_extra(cls.package, extra=cls.ending[1:], subject=f"A file that ends in {cls.ending}")

    def __init__(self, file: BinaryIO, *, best: int, truth: bool) -> None:
        self.file, self.best, self.has_truth = file, best, truth

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        pairs = [f"{name}{'' if place == 1 else f'_{place}'}" for place in self._places for name in ("label", "score")]
        return ["file", *(["truth"] if self.has_truth else []), *pairs, "error"]

    @property
    def _places(self) -> range:
        return range(1, self.best + 1)

    def cells(self, row: PredictionRow) -> Iterator[str | float | None]:
        """What stands in each column; None where there is nothing."""
        yield row["file"]
        if self.has_truth:
            yield row.get("truth")
        predictions = row.get("predictions", ())
        for place in range(self.best):
            one = predictions[place] if place < len(predictions) else {}
            yield one.get("label")
            yield one.get("score")
        yield row.get("error")

    @abstractmethod
    def add(self, row: PredictionRow) -> None:
        """Add a row."""

    def close(self) -> None:
        """Write what is still in memory; the file stays open."""
        self.file.flush()


class CsvTable(PredictionTable):
    """Comma-separated values in UTF-8 with the mark that spreadsheets know it by. A text that a spreadsheet would
    compute begins with an apostrophe, which stops that."""

    ending = ".csv"
    _COMPUTED = ("=", "+", "-", "@", "\t", "\r")

    def __init__(self, file: BinaryIO, *, best: int, truth: bool) -> None:
        super().__init__(file, best=best, truth=truth)
        file.write(codecs.BOM_UTF8)
        self._writer = csv.writer(self)
        self._writer.writerow(self.columns)

    def add(self, row: PredictionRow) -> None:
        self._writer.writerow([self._cell(value) for value in self.cells(row)])

    def write(self, text: str) -> None:
        """Write a line of the file; csv calls it."""
        self.file.write(escape_surrogates(text).encode())

    def _cell(self, value: str | float | None) -> str:
        if isinstance(value, str):
            return f"'{value}" if value.startswith(self._COMPUTED) else value
        return "" if value is None else f"{value:.7g}"


class JsonLinesTable(PredictionTable):
    """The lines of `predict --json`."""

    ending = ".jsonl"

    def add(self, row: PredictionRow) -> None:
        self.file.write(json_text(row).encode() + b"\n")


class ParquetTable(PredictionTable):
    """Apache Parquet, by pyarrow: the extra `parquet`."""

    ending = ".parquet"
    package = "pyarrow.parquet"
    _TOGETHER = 16_384  # rows that are kept in memory before they are written

    def __init__(self, file: BinaryIO, *, best: int, truth: bool) -> None:
        super().__init__(file, best=best, truth=truth)
        self.check()
        import pyarrow
        import pyarrow.parquet

        kinds = [pyarrow.float32() if name.startswith("score") else pyarrow.string() for name in self.columns]
        self._schema = pyarrow.schema(list(zip(self.columns, kinds, strict=True)))
        self._batch = pyarrow.record_batch
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema)
        self._rows: list[list[str | float | None]] = []

    def add(self, row: PredictionRow) -> None:
        self._rows.append([escape_surrogates(cell) if isinstance(cell, str) else cell for cell in self.cells(row)])
        if len(self._rows) >= self._TOGETHER:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_batch(self._batch(list(zip(*self._rows, strict=True)), schema=self._schema))
            self._rows = []

    def close(self) -> None:
        self._flush()
        self._writer.close()


FORMATS: tuple[type[PredictionTable], ...] = (CsvTable, JsonLinesTable, ParquetTable)


def table_endings() -> list[str]:
    """The endings of files that answers can be written to."""
    return [one.ending for one in FORMATS]


def check_table(path: Path, *, force: bool, others: Sequence[str] = ()) -> None:
    """Refuse a path that answers could not be written to, before any work is done. `others` are endings that the caller
    writes itself."""
    known = [*table_endings(), *others]
    if path.suffix.lower() not in known or path.is_dir():
        near = did_you_mean(path.suffix.lower(), known) if path.suffix else ""
        raise UsageError(f"Output must be a file that ends in {', '.join(known)}, got {str(path)!r}.{near}")
    for one in FORMATS:
        if path.suffix.lower() == one.ending:
            one.check()
    refuse_existing(path, force=force)
    check_writable(path.parent if os.path.lexists(path) else path)


@contextlib.contextmanager
def open_table(path: Path, *, best: int, truth: bool = False, force: bool = False) -> Generator[PredictionTable]:
    """A table to write; it is at `path` only if the block succeeds."""
    kind = next(one for one in FORMATS if path.suffix.lower() == one.ending)
    with atomic_file(path, force=force) as file:
        table = kind(file, best=best, truth=truth)
        try:
            yield table
        except BaseException:
            with contextlib.suppress(Exception):  # no file will be there: it must only not complain later
                table.close()
            raise
        table.close()
