"""Source of data: a CSV file of image files and their labels."""

import codecs
import contextlib
import csv
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.data.image_files import is_file
from vitrail.data.sources.base import SPLIT_NAMES, Source

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

_COLUMNS = ("label", "labels", "split")
_ENCODINGS = {"utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "cp949": "CP949"}
_HEAD_BYTES = 4096  # first bytes of a file, in which UTF-16 is detected
_FILE_COLUMNS = ("file", "path", "filename", "image")


class CsvLine(NamedTuple):
    """The cells of a line of a CSV file; an empty text for a missing cell."""

    number: int
    text: str
    """The whole line, for messages."""
    file: str
    label: str
    split: str


class CsvFile(Source):
    """Source of data: a CSV file with lines of `file,label` or `file,label,split`, with or without a header.

    Files are relative to the folder of the CSV file. With the header `file,labels`, an image has any number of labels,
    separated by semicolons.
    """

    description = "a .csv file of image files and labels"

    def recognises(self, data: str | Path) -> bool:
        return is_file(data, ".csv")

    def open(self, data: str | Path) -> "Dataset":
        from vitrail.data.dataset import Dataset

        path = Path(data)
        files: dict[str, list[tuple[str, str | tuple[str, ...]]]] = {}
        text, notes = decode_csv(path, path.read_bytes())
        for split, file, label in _parse_csv_lines(path, text):
            files.setdefault(split, []).append((str(path.parent / file), label))
        if "all" in files and len(files) > 1:
            raise CorruptFileError(path=path, cause="must name a split in every line or in none")
        image_labels = [label for pairs in files.values() for _, label in pairs]
        classes = {name for label in image_labels for name in ((label,) if isinstance(label, str) else label)}
        if not classes:
            raise CorruptFileError(path=path, cause="has no label in any line")
        dataset = Dataset.from_files(str(path), files, classes, root=str(path.parent))
        if not dataset.is_multilabel:
            return dataclasses.replace(dataset, notes=notes)
        mean = sum(map(len, image_labels)) / len(image_labels)
        note = f"read as images with several labels: {mean:.2g} of {len(classes):,} on average"
        return dataclasses.replace(dataset, notes=(*notes, note))


def _check_csv_cells(path: Path, header: list[str], rows: list[tuple[int, list[str]]]) -> None:
    """Reject lines that end too early, and a column of splits under another name, which would be ignored."""
    if short := next((line for line in rows if len(line[1]) < len(header)), None):
        raise CorruptFileError(
            f"Line {short[0]} of {str(path)!r} must have {len(header)} cells, as its header does, got"
            f" {','.join(short[1])!r}.",
            path=path,
        )
    for column, name in enumerate(header):
        values = {row[column].strip().lower() for _, row in rows}
        if name not in (*_COLUMNS, *_FILE_COLUMNS) and values and values <= SPLIT_NAMES.keys():
            raise UsageError(
                f"CSV header must call the column of {', '.join(sorted(values))} split, got {name!r} in {str(path)!r}."
            )


def decode_csv(path: Path, content: bytes) -> tuple[str, tuple[str, ...]]:
    """Return the text of a CSV file with this content, and a note if it is not in UTF-8.

    UTF-16 and CP949 are also read: Korean Excel saves "CSV" in CP949.
    """
    encoding = _guess_encoding(content)
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CorruptFileError(
            path=path,
            cause=f"must be text in UTF-8, UTF-16 or CP949, got other bytes in line {line}",
            advice='Save it as "CSV UTF-8".',
        ) from None
    return text, () if encoding == "utf-8-sig" else (f"{path.name} is read as text in {_ENCODINGS[encoding]}",)


def _guess_encoding(content: bytes) -> str:
    """Return the encoding of a CSV file: UTF-16 with or without byte order mark, CP949, or UTF-8 by default."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    head = content[:_HEAD_BYTES]
    # UTF-16 without a byte order mark: commas, digits and line ends have a zero byte after or before them.
    if 10 * head.count(0) > len(head):
        return "utf-16-le" if head[1::2].count(0) > head[::2].count(0) else "utf-16-be"
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError:
        with contextlib.suppress(UnicodeDecodeError):
            pairs = [letter.encode("cp949") for letter in content.decode("cp949") if not letter.isascii()]
            # Text in other encodings often decodes as CP949, but seldom to common syllables of Hangul (KS X 1001).
            if 2 * sum(0xB0 <= pair[0] <= 0xC8 and pair[1] >= 0xA1 for pair in pairs) > len(pairs):
                return "cp949"
    return "utf-8-sig"


def _find_csv_columns(path: Path, header: list[str]) -> dict[str, int]:
    """Return the index of the columns file, label and split; a missing split has the index after the last column."""
    names = ["file" if name in _FILE_COLUMNS else name for name in header]
    index_of = {name: index for index, name in enumerate(names)}
    label = "labels" if "labels" in header else "label"
    if any(names.count(name) > 1 for name in ("file", label, "split")) or {"label", "labels"} <= index_of.keys():
        raise UsageError(
            f"CSV header must name file, label (or labels) and split once, got {', '.join(header)} in {str(path)!r}."
        )
    if not {"file", label} <= index_of.keys():
        raise UsageError(f"CSV header must have file and label (or labels), got {', '.join(header)} in {str(path)!r}.")
    return {"file": index_of["file"], "label": index_of[label], "split": index_of.get("split", len(header))}


def read_csv_lines(path: Path, text: str) -> tuple[bool, list[CsvLine]]:
    """Return whether the header says that images have several labels, and all lines with cells, without the header."""
    try:
        rows = [(number, row) for number, row in enumerate(csv.reader(io.StringIO(text, newline=""), strict=True), 1)]
    except csv.Error as error:
        raise CorruptFileError(path=path, cause=f"cannot be read as CSV ({error})") from None
    rows = [(number, row) for number, row in rows if any(row)]
    columns = {"file": 0, "label": 1, "split": 2}
    header = [cell.strip().lower() for cell in rows[0][1]] if rows else []
    is_multilabel = "labels" in header
    width = len(columns)
    if is_multilabel or "label" in header or (header[:1] and header[0] in _FILE_COLUMNS):
        columns = _find_csv_columns(path, header)
        width, rows = len(header), rows[1:]
        _check_csv_cells(path, header, rows)
    if not rows:
        raise UsageError(f"CSV must have lines of file,label, got none in {str(path)!r}.")
    for number, row in rows:
        if any(row[width:]):
            raise CorruptFileError(
                f"Line {number} of {str(path)!r} must have at most {width} cells, got {','.join(row)!r}.", path=path
            )
    cells = [{name: row[column] if column < len(row) else "" for name, column in columns.items()} for _, row in rows]
    lines = [CsvLine(number, ",".join(row), **line) for (number, row), line in zip(rows, cells, strict=True)]
    return is_multilabel, lines


def _parse_csv_lines(path: Path, text: str) -> list[tuple[str, str, str | tuple[str, ...]]]:
    """Return the split (`all` if empty), the file and the label (or tuple of labels) of every line."""
    is_multilabel, csv_lines = read_csv_lines(path, text)
    lines: list[tuple[str, str, str | tuple[str, ...]]] = []
    label_of: dict[str, str | tuple[str, ...]] = {}
    for line in csv_lines:
        file, cell, split_name = line.file.strip(), line.label.strip(), line.split.strip()
        if not file or (not cell and not is_multilabel):
            raise CorruptFileError(
                f"Line {line.number} of {str(path)!r} must be file,label with a comma, got {line.text!r}.", path=path
            )
        split = SPLIT_NAMES.get(split_name.lower()) if split_name else "all"
        if split is None:
            raise CorruptFileError(
                f"Line {line.number} of {str(path)!r} must have the split train, val or test, got {split_name!r}.",
                path=path,
            )
        labels = tuple(sorted(set(filter(None, map(str.strip, cell.split(";"))))))
        label = labels if is_multilabel else cell
        if label_of.setdefault(file, label) != label:
            raise CorruptFileError(
                f"Line {line.number} of {str(path)!r} must label {file!r} as an earlier line does, got {cell!r}.",
                path=path,
            )
        lines.append((split, file, label))
    return lines
