"""Where the answers of `vitrail predict` go besides the terminal, and in which order."""

import contextlib
import dataclasses
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import numpy as np

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import atomic_file, check_output, check_writable, refuse_existing
from vitrail.evaluation.predictions.prediction_tables import PredictionRow, check_table, open_table
from vitrail.evaluation.predictions.row_sorting import Order, sort_rows
from vitrail.reports.contact_sheet import ContactSheet, open_contact_sheet


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionOutputs:
    """What is written of the answers."""

    table: Path | None = None
    """A table: a file of one of the `FORMATS`."""
    page: Path | None = None
    """A folder for a contact sheet."""
    features: Path | None = None
    """An .npz file of features, the input of the head."""
    sort: Order | None = None
    """The order of the answers; by default that of the images."""
    force: bool = False
    """Whether existing outputs are overwritten."""

    @property
    def need_classes(self) -> bool:
        """Whether they are of answers that name a class."""
        return self.table is not None or self.page is not None or self.sort is not None

    def check(self) -> None:
        """Refuse what could not be written, before any work is done."""
        if self.features is not None:
            _check_features(self.features, force=self.force)
        if self.table is not None:
            check_table(self.table, force=self.force)
        if self.page is not None:
            check_output(self.page, force=self.force)

    def take(self, rows: Iterable[PredictionRow], *, model: str, best: int) -> Generator[PredictionRow]:
        """Write rows as soon as they are known or, if they are sorted, when all are, `best` classes of each; and yield
        them."""
        features: list[tuple[str, np.ndarray]] = []
        with contextlib.ExitStack() as stack:
            table = None
            if self.table is not None:
                table = stack.enter_context(open_table(self.table, best=best, force=self.force))
            sheet = None
            if self.page is not None:
                by = self.sort or "uncertain"
                sheet = stack.enter_context(open_contact_sheet(self.page, model, by=by, force=self.force))
            plain = _separate(rows, features, sheet)
            if self.sort is not None:
                beside = None if self.table is None else self.table.absolute().parent
                plain = stack.enter_context(sort_rows(plain, self.sort, beside))
            for row in plain:
                if table is not None:
                    table.add(row)
                yield row
        if self.features is not None:
            _write_features(self.features, features, force=self.force)


def _separate(
    rows: Iterable[PredictionRow], features: list[tuple[str, np.ndarray]], sheet: ContactSheet | None
) -> Iterator[PredictionRow]:
    """The rows without features and thumbnails, which go to the list and to the sheet."""
    for row in rows:
        if "features" in row:
            features.append((row["file"], row.pop("features")))
        if sheet is not None:
            sheet.add(row)
            row.pop("thumbnail", None)
        yield row


def _check_features(path: Path, *, force: bool) -> None:
    if path.suffix != ".npz" or path.is_dir():
        raise UsageError(f"Features must go to a file that ends in .npz, got {str(path)!r}.")
    refuse_existing(path, force=force)
    check_writable(path.parent if path.exists() else path)


def _write_features(path: Path, rows: list[tuple[str, np.ndarray]], *, force: bool) -> None:
    """Write names of files and their features, (n) and (n, D), to one .npz, atomically."""
    if not rows:
        raise CorruptFileError(f"No image could be read, so {str(path)!r} is not written.")
    files, features = zip(*rows, strict=True)
    with atomic_file(path, force=force) as file:
        np.savez(file, files=np.array(files), features=np.stack(features))
