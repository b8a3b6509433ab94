"""Terminal output: JSON, tables and progress. Results go to stdout, messages to stderr.

Untrusted text (names of files and classes, messages of other libraries) is printed through `escape_unprintable`. JSON
is printed through `json_text`, whose escapes keep the content unchanged.
"""

import contextlib
import html
import importlib
import json
import math
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TextIO

from vitrail.core.language import localise

_MAX_LINE = 1000  # characters
_METER_DELAY, _METER_INTERVAL = 1.0, 0.2  # seconds before a `Meter` appears, and between its updates
_MAX_MARKS = 4  # combining marks on one character; no script needs more
_INVISIBLE = "\u115f\u1160\u2800\u3164\uffa0"  # blank characters that Unicode counts as letters or symbols


def print_json(document: object) -> None:
    """Print a document to stdout as one line of JSON."""
    sys.stdout.write(json_text(document) + "\n")


def json_text(document: object, *, default: Callable[[Any], Any] | None = None) -> str:
    """Return a document as one line of JSON.

    Printable characters of any language are kept, others are escaped. NaN and infinities become null.
    """
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, default=default)
    except ValueError:
        text = json.dumps(finite(document), ensure_ascii=False, allow_nan=False, default=default)
    if text.isprintable():
        return text
    # Only strings can have unprintable characters: the rest of the line is ASCII.
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def finite(document: Any) -> Any:
    """Return a document with None in place of every NaN and infinity."""
    match document:
        case dict():
            return {key: finite(value) for key, value in document.items()}
        case list() | tuple():
            return [finite(value) for value in document]
        case float() if not math.isfinite(document):
            return None
    return document


Say = Callable[[str], None]


class MessageStream:
    """A stream for messages, which never raises.

    Text that cannot be written (full disk, closed pipe or terminal) is discarded, because a message must not end a run.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text; discard it if that fails."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; ignore a failure."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, whose output can be updated in place."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookLine:
    """A progress bar and a line of text in the output of a notebook's cell, updated in place.

    A failure to display them is ignored, because a message must not end a run.
    """

    def __init__(self) -> None:
        self._display: Any = None

    def show(self, text: str, share: float) -> None:
        """Display the text and a bar for the share that is done, from 0 to 1."""
        bar = f'<progress value="{share:.4f}" style="vertical-align: middle"></progress>'
        content = {"text/plain": text, "text/html": f"{bar} <code>{html.escape(text)}</code>"}
        with contextlib.suppress(Exception):
            if self._display is None:
                display = importlib.import_module("IPython.display").display
                self._display = display(content, raw=True, display_id=True)
            else:
                self._display.update(content, raw=True)


class Meter:
    """A progress line: how many images (or other items) are done, the time left, and the speed.

    It appears after a second, only in a terminal or a notebook. In a terminal the line is cleared at the end; used as a
    context manager, the meter also clears it after an error.
    """

    def __init__(self, total: int, noun: str) -> None:
        self._total, self._noun = total, noun
        self._notebook = NotebookLine() if in_notebook() else None
        is_watched = self._notebook is not None or (sys.stderr is not None and sys.stderr.isatty())
        self._start_time = time.monotonic()
        self._next_update = self._start_time + _METER_DELAY if is_watched else math.inf
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, done: int) -> None:
        """Update the line with the number of items that are done."""
        if (now := time.monotonic()) < self._next_update and (done < self._total or not self._width):
            return
        self._next_update = now + _METER_INTERVAL
        parts = [localise(f"{done:,} of {self._total:,} {self._noun}")]
        if done and now > self._start_time:
            rate = done / (now - self._start_time)
            parts.append(localise(f"{format_duration((self._total - done) / rate)} left"))
            parts.append(localise(f"{rate:,.{0 if rate >= 10 else 1}f} {self._noun}/s"))
        if self._notebook is not None:
            text = ", ".join(parts)
            self._notebook.show(text, done / self._total)
            self._width = display_width(text)
        elif done >= self._total:
            self.clear()
        else:
            self._draw(parts)

    def clear(self) -> None:
        """Remove the line from a terminal, to print other output. The next call draws it again at once."""
        if self._width and self._notebook is None:
            self._write("\r" + " " * self._width + "\r")
            self._width, self._next_update = 0, 0.0

    def _draw(self, parts: list[str]) -> None:
        """Replace the line on the terminal. The last parts are left out if they do not fit."""
        columns = terminal_width(sys.stderr) - 1  # some terminals start a new line after the last column
        while len(parts) > 1 and display_width(", ".join(parts)) > columns:
            parts = parts[:-1]
        text = ", ".join(parts)
        while display_width(text) > columns:
            text = text[:-1]
        width = display_width(text)
        self._write("\r" + text + " " * (self._width - width))
        self._width = width

    def _write(self, text: str) -> None:
        """Write text to stderr without delay."""
        messages = MessageStream(sys.stderr)
        messages.write(text)
        messages.flush()


def terminal_width(terminal: TextIO) -> int:
    """Return the number of columns of a terminal; 80 if it is unknown."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def say(line: str) -> None:
    """Print a message to stderr; in a notebook to stdout, because notebooks show stderr as an error.

    The command line prints it in the language of the user.
    """
    messages = MessageStream(sys.stdout if in_notebook() else sys.stderr)
    messages.write(escape_unprintable(localise(line)) + "\n")
    messages.flush()


def say_nothing(_line: str) -> None:
    """Discard a message; used in place of `say`."""


def format_duration(seconds: float) -> str:
    """Return a duration as minutes:seconds, or hours:minutes:seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def print_table(
    headers: Sequence[str] | None, rows: list[list[str]], *, droppable: Sequence[str] = (), wrapped: str | None = None
) -> None:
    """Print rows of text to stdout, wrapped to the width of a terminal (not in a pipe).

    In a narrow terminal, `droppable` columns are left out, in their order, until the table fits. The column `wrapped`
    has long texts: it is wrapped to a quarter of the width before others are left out. The command line translates
    headers; without headers, rows are names and values, which are both translated.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    # A pipe has no width: do not wrap.
    console = Console(width=None if sys.stdout.isatty() else 100_000)
    names = headers or [""] * max(map(len, rows), default=0)
    if headers is None:
        rows = [[localise(name, "headings"), *(localise(value, "cells") for value in values)] for name, *values in rows]
    for dropped_count in range(len(droppable) + 1):
        indices = [index for index, name in enumerate(names) if name not in droppable[:dropped_count]]
        widths = [console.width // 4 if names[index] == wrapped else None for index in indices]
        columns = [
            Column(localise(names[index], "headings"), overflow="fold", max_width=width)
            for index, width in zip(indices, widths, strict=True)
        ]
        table = Table(*columns, box=None, pad_edge=False, show_header=headers is not None)
        for row in rows:
            table.add_row(*(Text(escape_unprintable(row[index])) for index in indices))  # not markup
        if console.measure(table, options=console.options.update(max_width=100_000)).maximum <= console.width:
            break
    for column in columns:
        column.max_width = None
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def print_line(line: str) -> None:
    """Print a line of text to stdout. The command line prints it in the language of the user."""
    sys.stdout.write(escape_unprintable(localise(line)) + "\n")


def display_width(text: str) -> int:
    """Return the number of terminal columns that a text takes."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def escape_unprintable(text: str) -> str:
    """Return untrusted text as one short line that is safe to print.

    Control, direction and invisible characters and long runs of combining marks are escaped. Text over 1,000 characters
    is shortened in the middle.
    """
    if not text.isascii() or not text.isprintable():
        text = "".join(_escape_characters(text))
    if len(text) <= _MAX_LINE:
        return text
    gap = f" ... ({len(text):,} characters) ... "
    half = (_MAX_LINE - len(gap)) // 2
    return text[:half] + gap + text[-half:]


def _escape_characters(text: str) -> Iterator[str]:
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        is_visible = character.isprintable() and marks <= _MAX_MARKS and character not in _INVISIBLE
        yield character if is_visible else character.encode("unicode_escape").decode()


def format_setting(value: Any) -> str:
    """Return a setting in the notation of recipes and `--set`."""
    match value:
        case None:
            return "-"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:g}"
        case list():
            return f"[{', '.join(map(format_setting, value))}]"
    return str(value)


def format_cell(value: Any) -> str:
    """Return a value as text for a table: "-", "224x224", "1,200"."""
    match value:
        case None:
            return "-"
        case [height, width]:
            return f"{height}x{width}"
        case int():
            return f"{value:,}"
    return str(value)
