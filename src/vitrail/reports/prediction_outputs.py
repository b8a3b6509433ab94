"""Optional outputs of `vitrail predict`: a table, a contact sheet, features; and the order of the predictions."""

import contextlib
import dataclasses
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import atomic_file, check_output, check_writable, refuse_existing
from vitrail.evaluation.predictions.prediction_tables import PredictionRow, check_table, open_table
from vitrail.evaluation.predictions.row_sorting import Order, sort_rows
from vitrail.reports.contact_sheet import ContactSheet, open_contact_sheet
from vitrail.reports.corrections import photo_link


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionOutputs:
    """Outputs of `predict` that the user asked for besides the terminal."""

    table: Path | None = None
    """File for a table of predictions, in one of the `FORMATS`."""
    page: Path | None = None
    """Folder for a contact sheet."""
    features: Path | None = None
    """An .npz file for the features, the input of the classification head."""
    sort: Order | None = None
    """Order of the predictions. None: the order of the images."""
    force: bool = False
    """Whether existing outputs are overwritten."""

    @property
    def need_classes(self) -> bool:
        """Whether an output needs a model that predicts classes."""
        return self.table is not None or self.page is not None or self.sort is not None

    def check(self) -> None:
        """Raise UsageError if an output cannot be written. Called before anything is computed."""
        if self.features is not None:
            _check_features_file(self.features, force=self.force)
        if self.table is not None:
            check_table(self.table, force=self.force)
        if self.page is not None:
            check_output(self.page, force=self.force)

    def write(
        self, rows: Iterable[PredictionRow], images: Iterable[Any], *, model: str, classes: Sequence[str], top_k: int
    ) -> Generator[PredictionRow]:
        """Write rows to the outputs and yield them without features and thumbnails.

        `images` are the paths or pixels of the rows, and `classes` those of the model. Unsorted rows are written and
        yielded at once, sorted ones after the last. The table has `top_k` classes per image.
        """
        features: list[tuple[str, np.ndarray]] = []
        with contextlib.ExitStack() as stack:
            table = None
            if self.table is not None:
                table = stack.enter_context(open_table(self.table, top_k=top_k, force=self.force))
            sheet = None
            if self.page is not None:
                by = self.sort or "uncertain"
                sheet = stack.enter_context(open_contact_sheet(self.page, model, classes, by=by, force=self.force))
            plain_rows = self._strip_arrays(rows, images, features, sheet)
            if self.sort is not None:
                folder = None if self.table is None else self.table.absolute().parent
                plain_rows = stack.enter_context(sort_rows(plain_rows, self.sort, folder))
            for row in plain_rows:
                if table is not None:
                    table.add(row)
                yield row
        if self.features is not None:
            _write_features(self.features, features, force=self.force)

    def _strip_arrays(
        self,
        rows: Iterable[PredictionRow],
        images: Iterable[Any],
        features: list[tuple[str, np.ndarray]],
        sheet: ContactSheet | None,
    ) -> Iterator[PredictionRow]:
        """Yield rows without features and thumbnails.

        Append features to the list and thumbnails to the contact sheet.
        """
        for row, image in zip(rows, images, strict=True):
            if "features" in row:
                features.append((row["file"], row.pop("features")))
            if sheet is not None and self.page is not None:
                path = os.path.abspath(image) if isinstance(image, str) else ""  # noqa: PTH100
                sheet.add(row, path, photo_link(image, self.page))
                row.pop("thumbnail", None)
            yield row


def _check_features_file(path: Path, *, force: bool) -> None:
    if path.suffix != ".npz" or path.is_dir():
        raise UsageError(f"Features must go to a file that ends in .npz, got {str(path)!r}.")
    refuse_existing(path, force=force)
    check_writable(path.parent if path.exists() else path)


def _write_features(path: Path, rows: list[tuple[str, np.ndarray]], *, force: bool) -> None:
    """Write file names (n) and features (n, D) to one .npz file, atomically. Raise CorruptFileError for no rows."""
    if not rows:
        raise CorruptFileError(f"No image could be read, so {str(path)!r} is not written.")
    files, features = zip(*rows, strict=True)
    with atomic_file(path, force=force) as file:
        np.savez(file, files=np.array(files), features=np.stack(features))
