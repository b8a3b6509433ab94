"""Tables of predictions, with one row per image that is written as soon as it is computed.

Columns are `file`, `truth` if the data has labels, `label`, `score`, `label_2`, `score_2`, ..., and `error` for an
image that could not be read. JSON lines are the output of `predict --json`. A format is a class that is listed in
`FORMATS`.
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
"""`{"file", "predictions": [{"label", "score"}, ...]}`, optionally with "truth"; or `{"file", "error"}`."""


class PredictionTable(ABC):
    """A file of predictions that is being written.

    A row has at most `top_k` predictions, and the true label if `has_truth`.
    """

    ending: ClassVar[str]
    """Ending of the file names of this format."""

    package: ClassVar[str] = ""
    """Package that the format needs. The extra that installs it has the name of the ending."""

    @classmethod
    def check(cls) -> None:
        """Raise MissingError if the package of the format is missing."""
        if cls.package:
            import_extra(cls.package, extra=cls.ending[1:], subject=f"A file that ends in {cls.ending}")

    def __init__(self, file: BinaryIO, *, top_k: int, has_truth: bool) -> None:
        self.file, self.top_k, self.has_truth = file, top_k, has_truth

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        suffixes = ["", *(f"_{rank}" for rank in range(2, self.top_k + 1))]
        pairs = [f"{name}{suffix}" for suffix in suffixes for name in ("label", "score")]
        return ["file", *(["truth"] if self.has_truth else []), *pairs, "error"]

    def cells(self, row: PredictionRow) -> Iterator[str | float | None]:
        """Yield the value of each column, or None for an empty cell."""
        yield row["file"]
        if self.has_truth:
            yield row.get("truth")
        predictions = row.get("predictions", ())
        for rank in range(self.top_k):
            prediction = predictions[rank] if rank < len(predictions) else {}
            yield prediction.get("label")
            yield prediction.get("score")
        yield row.get("error")

    @abstractmethod
    def add(self, row: PredictionRow) -> None:
        """Add the row of an image to the table."""

    def close(self) -> None:
        """Write buffered rows. The file stays open."""
        self.file.flush()


class CsvTable(PredictionTable):
    """Comma-separated values in UTF-8, with the byte order mark by which spreadsheets recognise UTF-8.

    Text that a spreadsheet would evaluate as a formula gets an apostrophe as a prefix.
    """

    ending = ".csv"
    _FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")

    def __init__(self, file: BinaryIO, *, top_k: int, has_truth: bool) -> None:
        super().__init__(file, top_k=top_k, has_truth=has_truth)
        file.write(codecs.BOM_UTF8)
        self._writer = csv.writer(self)
        self._writer.writerow(self.columns)

    def add(self, row: PredictionRow) -> None:
        self._writer.writerow([self._format_cell(value) for value in self.cells(row)])

    def write(self, text: str) -> None:
        """Write a line of the file. Called by the csv writer."""
        self.file.write(escape_surrogates(text).encode())

    def _format_cell(self, value: str | float | None) -> str:
        if isinstance(value, str):
            return f"'{value}" if value.startswith(self._FORMULA_STARTS) else value
        return "" if value is None else f"{value:.7g}"


class JsonLinesTable(PredictionTable):
    """JSON lines, as `predict --json` prints them."""

    ending = ".jsonl"

    def add(self, row: PredictionRow) -> None:
        self.file.write(json_text(row).encode() + b"\n")


class ParquetTable(PredictionTable):
    """Apache Parquet, written by pyarrow (the extra `parquet`)."""

    ending = ".parquet"
    package = "pyarrow.parquet"
    _BATCH_ROWS = 16_384  # rows that are buffered before they are written

    def __init__(self, file: BinaryIO, *, top_k: int, has_truth: bool) -> None:
        super().__init__(file, top_k=top_k, has_truth=has_truth)
        self.check()
        import pyarrow
        import pyarrow.parquet

        types = [pyarrow.float32() if name.startswith("score") else pyarrow.string() for name in self.columns]
        self._schema = pyarrow.schema(list(zip(self.columns, types, strict=True)))
        self._batch = pyarrow.record_batch
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema)
        self._rows: list[list[str | float | None]] = []

    def add(self, row: PredictionRow) -> None:
        self._rows.append([escape_surrogates(cell) if isinstance(cell, str) else cell for cell in self.cells(row)])
        if len(self._rows) >= self._BATCH_ROWS:
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
    """Return the endings of files to which predictions can be written."""
    return [table_type.ending for table_type in FORMATS]


def check_table(path: Path, *, force: bool, other_endings: Sequence[str] = ()) -> None:
    """Raise if predictions cannot be written to this path. Called before anything is computed.

    `other_endings` are endings of files that the caller writes itself.
    """
    endings = [*table_endings(), *other_endings]
    if path.suffix.lower() not in endings or path.is_dir():
        suggestion = did_you_mean(path.suffix.lower(), endings) if path.suffix else ""
        raise UsageError(f"Output must be a file that ends in {', '.join(endings)}, got {str(path)!r}.{suggestion}")
    for table_type in FORMATS:
        if path.suffix.lower() == table_type.ending:
            table_type.check()
    refuse_existing(path, force=force)
    check_writable(path.parent if os.path.lexists(path) else path)


@contextlib.contextmanager
def open_table(path: Path, *, top_k: int, has_truth: bool = False, force: bool = False) -> Generator[PredictionTable]:
    """Open a table for writing. The file appears at `path` only if the block succeeds."""
    table_type = next(table_type for table_type in FORMATS if path.suffix.lower() == table_type.ending)
    with atomic_file(path, force=force) as file:
        table = table_type(file, top_k=top_k, has_truth=has_truth)
        try:
            yield table
        except BaseException:
            with contextlib.suppress(Exception):  # the file is discarded: close only for the resources
                table.close()
            raise
        table.close()
