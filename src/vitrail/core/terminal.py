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

_LONGEST = 1000  # characters of a line for people
_FIRST_SHOWN, _SHOWN_EVERY = 1.0, 0.2  # seconds before a `Meter` shows anything, and between its changes
_MOST_MARKS = 4  # combining marks on one character; no script needs more
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"  # letters to Unicode, which show nothing


def print_json(document: object) -> None:
    """One document, in one line."""
    sys.stdout.write(json_text(document) + "\n")


def json_text(document: object, *, default: Callable[[Any], Any] | None = None) -> str:
    """JSON in one line. Printable characters of any language stay as they are, others are escaped; NaN and infinities
    become null."""
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, default=default)
    except ValueError:
        text = json.dumps(finite(document), ensure_ascii=False, allow_nan=False, default=default)
    if text.isprintable():
        return text
    # Outside of its strings, a line of JSON is ASCII.
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def finite(document: Any) -> Any:
    """The same document with null in place of every number that is not finite."""
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
    """A stream for messages: text that cannot be written (full disk, reader that has left, closed terminal) is lost,
    because no message is worth ending a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, if that is possible."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if that is possible."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: no terminal, but what it displays can be updated in place."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


class NotebookLine:
    """A bar and a line of text in the output of a notebook's cell, updated in place. No message is worth ending a run,
    so what cannot be displayed is not."""

    def __init__(self) -> None:
        self._display: Any = None

    def show(self, text: str, share: float) -> None:
        """Display the text and how much is done, from 0 to 1."""
        bar = f'<progress value="{share:.4f}" style="vertical-align: middle"></progress>'
        shown = {"text/plain": text, "text/html": f"{bar} <code>{html.escape(text)}</code>"}
        with contextlib.suppress(Exception):
            if self._display is None:
                display = importlib.import_module("IPython.display").display
                self._display = display(shown, raw=True, display_id=True)
            else:
                self._display.update(shown, raw=True)


class Meter:
    """Shows how many images (or other things) are done, how fast, and the time left, if somebody watches and it takes
    more than a moment: in a terminal on a line that is cleared in the end, in a notebook as `NotebookLine`. As a
    context manager, it also clears the line after an error."""

    def __init__(self, total: int, noun: str) -> None:
        self._total, self._noun = total, noun
        self._notebook = NotebookLine() if in_notebook() else None
        is_watched = self._notebook is not None or (sys.stderr is not None and sys.stderr.isatty())
        self._began = time.monotonic()
        self._next = self._began + _FIRST_SHOWN if is_watched else math.inf
        self._width = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, done: int) -> None:
        """Tell how many are done."""
        if (now := time.monotonic()) < self._next and (done < self._total or not self._width):
            return
        self._next = now + _SHOWN_EVERY
        parts = [f"{done:,} of {self._total:,} {self._noun}"]
        if done and now > self._began:
            rate = done / (now - self._began)
            parts.append(f"{format_duration((self._total - done) / rate)} left")
            parts.append(f"{rate:,.{0 if rate >= 10 else 1}f} {self._noun}/s")
        if self._notebook is not None:
            text = ", ".join(parts)
            self._notebook.show(text, done / self._total)
            self._width = len(text)
        elif done >= self._total:
            self.clear()
        else:
            self._draw(parts)

    def clear(self) -> None:
        """Remove the line from a terminal, so that something else can be printed there. The next call draws it again at
        once."""
        if self._width and self._notebook is None:
            self._write("\r" + " " * self._width + "\r")
            self._width, self._next = 0, 0.0

    def _draw(self, parts: list[str]) -> None:
        columns = _columns_of(sys.stderr) - 1  # in the last column, some terminals begin a new line
        while len(parts) > 1 and len(", ".join(parts)) > columns:
            parts = parts[:-1]
        text = ", ".join(parts)[:columns]
        self._write("\r" + text.ljust(self._width))
        self._width = len(text)

    def _write(self, text: str) -> None:
        messages = MessageStream(sys.stderr)
        messages.write(text)
        messages.flush()


def _columns_of(terminal: TextIO) -> int:
    """The width of a terminal; 80 if it does not tell."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def say(line: str) -> None:
    """Print a line to stderr; in a notebook to stdout, because notebooks show stderr as if it were an error."""
    messages = MessageStream(sys.stdout if in_notebook() else sys.stderr)
    messages.write(escape_unprintable(line) + "\n")
    messages.flush()


def say_nothing(_line: str) -> None:
    """Replaces `say` where nothing should be printed."""


def format_duration(seconds: float) -> str:
    """A duration as minutes:seconds, or hours:minutes:seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def print_table(headers: Sequence[str] | None, rows: list[list[str]], *, droppable: Sequence[str] = ()) -> None:
    """Print rows of text; wrapped to the width of a terminal, but not in a pipe. In a narrow terminal, `droppable`
    columns are left out one by one, the first one first."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    # Piped output has no width of its own: never wrap it.
    console = Console(width=None if sys.stdout.isatty() else 100_000)
    names = headers or [""] * max(map(len, rows), default=0)
    for dropped in range(len(droppable) + 1):
        kept = [index for index, name in enumerate(names) if name not in droppable[:dropped]]
        columns = [Column(names[index], overflow="fold") for index in kept]
        table = Table(*columns, box=None, pad_edge=False, show_header=headers is not None)
        for row in rows:
            table.add_row(*(Text(escape_unprintable(row[index])) for index in kept))  # names are text, not markup
        if console.measure(table, options=console.options.update(max_width=100_000)).maximum <= console.width:
            break
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write(captured.get())


def display_width(text: str) -> int:
    """Width of a text on a terminal, in columns."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def escape_unprintable(text: str) -> str:
    """Untrusted text as one short line. Control, direction and invisible characters and long runs of combining marks
    are escaped; a line that is too long is shortened in the middle."""
    if not text.isascii() or not text.isprintable():
        text = "".join(_escaped(text))
    if len(text) <= _LONGEST:
        return text
    gap = f" ... ({len(text):,} characters) ... "
    kept = (_LONGEST - len(gap)) // 2
    return text[:kept] + gap + text[-kept:]


def _escaped(text: str) -> Iterator[str]:
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        is_shown = character.isprintable() and marks <= _MOST_MARKS and character not in _BLANK
        yield character if is_shown else character.encode("unicode_escape").decode()


def format_setting(value: Any) -> str:
    """A setting in the notation of recipes and `--set`."""
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
    """A setting as a table shows it."""
    match value:
        case None:
            return "-"
        case [height, width]:
            return f"{height}x{width}"
        case int():
            return f"{value:,}"
    return str(value)
