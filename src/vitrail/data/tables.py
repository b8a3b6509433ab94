"""A table of image files and their classes."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.data.base import SPLIT_NAMES, Source
from vitrail.data.files import is_file
from vitrail.errors import DamagedError, UsageError

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

_FILE_COLUMNS = ("file", "path", "filename", "image")


class CsvFile(Source):
    """Lines of `file,label` or `file,label,split`, with or without a header; files are relative to the CSV's folder."""

    description = "a .csv file of image files and labels"

    def recognises(self, data: str | Path) -> bool:
        return is_file(data, ".csv")

    def open(self, data: str | Path) -> "Dataset":
        from vitrail.data.dataset import Dataset

        path = Path(data)
        files: dict[str, list[tuple[str, str]]] = {}
        for split, file, label in _read_lines(path):
            files.setdefault(split, []).append((str(path.parent / file), label))
        if "all" in files and len(files) > 1:
            raise DamagedError(path=path, cause="must name a split in every line or in none")
        labels = {label for pairs in files.values() for _, label in pairs}
        return Dataset.from_files(str(path), files, labels, root=str(path.parent))


def _read_lines(path: Path) -> list[tuple[str, str, str]]:
    """The split, file and label of every line; the split is `all` if there is none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file, strict=True), 1) if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DamagedError(path=path, cause=f"cannot be read as CSV ({error})") from None
    columns = {"file": 0, "label": 1, "split": 2}
    header = [cell.strip().lower() for cell in rows[0][1]] if rows else []
    if "label" in header or (header[:1] and header[0] in _FILE_COLUMNS):
        named = {("file" if name in _FILE_COLUMNS else name): place for place, name in enumerate(header)}
        if not {"file", "label"} <= named.keys():
            raise UsageError(f"CSV header must have file and label, got {', '.join(header)} in {str(path)!r}.")
        columns = {"file": named["file"], "label": named["label"], "split": named.get("split", len(header))}
        rows = rows[1:]
    if not rows:
        raise UsageError(f"CSV must have lines of file,label, got none in {str(path)!r}.")
    lines = []
    for number, row in rows:
        cells = {name: row[place].strip() if place < len(row) else "" for name, place in columns.items()}
        if not cells["file"] or not cells["label"]:
            raise DamagedError(
                f"Line {number} of {str(path)!r} must be file,label with a comma, got {','.join(row)!r}.",
                path=path,
            )
        split = SPLIT_NAMES.get(cells["split"].lower()) if cells["split"] else "all"
        if split is None:
            raise DamagedError(
                f"Line {number} of {str(path)!r} must have the split train, val or test, got {cells['split']!r}.",
                path=path,
            )
        lines.append((split, cells["file"], cells["label"]))
    return lines
