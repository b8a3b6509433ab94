"""What commands print: one JSON document, or tables. Results go to stdout, messages to stderr.

Text from outside (names of files and classes, other libraries' messages) reaches a terminal through `printable`, and
JSON through `json_text`, which escapes it but changes nothing.
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
from pathlib import Path
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


class Messages:
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
            parts.append(f"{clock((self._total - done) / rate)} left")
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
        messages = Messages(sys.stderr)
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
    messages = Messages(sys.stdout if in_notebook() else sys.stderr)
    messages.write(printable(line) + "\n")
    messages.flush()


def say_nothing(_line: str) -> None:
    """Replaces `say` where nothing should be printed."""


def clock(seconds: float) -> str:
    """A duration as minutes:seconds, or hours:minutes:seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def print_run(sentence: str | None, folder: Path) -> None:
    """Print the scores of a finished run and its folder."""
    lines = [f"model   {folder / 'bundle'}", f"report  {folder / 'report.html'}"]
    sys.stdout.write("".join(f"{printable(line)}\n" for line in ([sentence] if sentence else []) + lines))


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
            table.add_row(*(Text(printable(row[index])) for index in kept))  # names are text, not markup
        if console.measure(table, options=console.options.update(max_width=100_000)).maximum <= console.width:
            break
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write(captured.get())


def print_bench(found: dict[str, Any]) -> None:
    """Print a row for each engine and precision, and what they were measured on."""
    headers = ["engine", "precision", "images/s", "start s", "memory MB", "size MB", "same answers"]
    is_judged = any("accuracy" in row for row in found["ways"])
    rows = []
    for row in found["ways"]:
        sizes = [f"{row['memory'] / 1e6:,.0f}", f"{row['size'] / 1e6:,.1f}"]
        same = f"{row['same']:,} of {row['images']:,}" if "same" in row else "-"
        cells = [f"{row['images_per_second']:,.1f}", f"{row['start_seconds']:.2f}", *sizes, same]
        if is_judged:
            low, high = row.get("accuracy_interval", (0, 0))
            is_known = "accuracy" in row
            cells.append(f"{row['accuracy']:.1%} ({low:.1%} to {high:.1%})" if is_known else "-")
            won = f"{row['only_this']} against {row['only_float32']}, p = {row['p_value']:.2g}" if is_known else "-"
            cells.append(won)
        rows.append([row["engine"], row["precision"], *cells])
    judged = ["accuracy", "right only by it, only by float32"] if is_judged else []
    print_table([*headers, *judged], rows)
    if shared := [f"{row['engine']} {row['precision']}" for row in found["ways"] if row["depends_on_batch"]]:
        sys.stdout.write(f"\n{', '.join(shared)}: a prediction may depend on the other images of its batch\n")
    load = found["load"]
    about = f"batches of {load['batch']}, {load['callers']} threads, answers to {found['data']}"
    sys.stdout.write(f"\n{printable(about)}\n{printable(found['machine'])}\n")


def print_scores(scores: dict[str, Any]) -> None:
    """Print the main scores of a protocol, and the classes, worst first."""
    matched = f"; classes matched {scores['labels_matched']}" if "labels_matched" in scores else ""
    rows = [["data", f"{scores['data']} ({scores['split']}, {scores['count']:,} images{matched})"]]
    if "features" in scores:
        place = "what the head reads" if scores["layer"] is None else f"layer {scores['layer']}, {scores['pooling']}"
        again = "; remembered" if scores["cached"] else ""
        rows.append(
            ["learned from", f"{scores['train_count']:,} images, {scores['features']} features ({place}{again})"]
        )
    if scores.get("penalty") is not None:
        rows.append(["penalty", f"{scores['penalty']:.3g}"])
    if "map" in scores:
        return _print_labels(scores, rows)
    low, high = scores["accuracy_interval"]
    rows += [
        ["accuracy", f"{scores['accuracy']:.2%} (95 % interval {low:.2%} to {high:.2%})"],
        ["top 5", f"{scores['top5']:.2%}"],
    ]
    if scores["ece"] is not None:
        rows.append(["calibration error", f"{scores['ece']:.3f}"])
    if "against" in scores:
        rows.append(["against", scores["against"]["sentence"]])
    print_table(None, rows)
    if "shots" in scores:
        sys.stdout.write("\n")
        rows = [[f"{row['shots']}", f"{row['train_count']:,}", *_mean_cells(row)] for row in scores["shots"]]
        rows.append(
            ["all", f"{scores['train_count']:,}", f"{scores['accuracy']:.2%}", f"{low:.2%} to {high:.2%} (Wilson)"]
        )
        print_table(("of each class", "images", "accuracy", f"95 % interval ({scores['seeds']} draws)"), rows)
    sys.stdout.write("\n")
    worst = sorted((row for row in scores["per_class"] if row["count"]), key=lambda row: row["accuracy"])
    rows = [[row["label"], f"{row['right']:,}", f"{row['count']:,}", f"{row['accuracy']:.1%}"] for row in worst[:20]]
    print_table(("class (worst first)", "right", "of", "accuracy"), rows)
    return None


def _print_labels(scores: dict[str, Any], rows: list[list[str]]) -> None:
    """The scores of several labels an image."""
    rows += [
        ["mAP", _share(scores["map"])],
        ["F1 at the thresholds", _share(scores["f1"])],
        ["all labels right", _share(scores["accuracy"])],
    ]
    print_table(None, rows)
    sys.stdout.write("\n")
    worst = sorted((row for row in scores["per_class"] if row["count"]), key=lambda row: row["average_precision"])
    cells = [
        [row["label"], f"{row['count']:,}", *(_share(row[key]) for key in ("average_precision", "precision", "recall"))]
        for row in worst[:20]
    ]
    print_table(("label (worst first)", "images", "average precision", "precision", "recall"), cells)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _mean_cells(row: dict[str, Any]) -> list[str]:
    interval = row["accuracy_interval"]
    return [f"{row['accuracy']:.2%}", "-" if interval is None else f"{interval[0]:.2%} to {interval[1]:.2%}"]


_MOST_PAIRS = 10


def print_runs(found: dict[str, Any]) -> None:
    """Print runs side by side, the best first: scores, settings that differ, comparisons."""
    rows = []
    for run in found["runs"]:
        accuracy, interval, images = "-", "-", "-"
        if run["accuracy"] is not None:
            low, high = run["accuracy_interval"]
            accuracy, interval = f"{run['accuracy']:.1%}", f"{low:.1%} to {high:.1%}"
            images = f"{run['count']:,} {run['split']}"
        steps = f"{run['steps']:,}{'' if run['finished'] else ' (unfinished)'}"
        time = "-" if run["seconds"] is None else clock(run["seconds"])
        rows.append([run["folder"], run["result"], accuracy, interval, images, steps, time])
    names = ("run", "model", "accuracy", "95 % interval", "images", "steps", "time")
    print_table(names, rows, droppable=("time", "steps", "images"))
    if found["differences"]:
        sys.stdout.write("\n")
        rows = [[key, *map(setting_cell, values)] for key, values in found["differences"].items()]
        print_table(("setting that differs", *(run["name"] for run in found["runs"])), rows)
    if pairs := found["pairs"]:
        best = found["runs"][0]["name"]
        shown = pairs if len(pairs) <= _MOST_PAIRS else [pair for pair in pairs if best in (pair["one"], pair["other"])]
        sys.stdout.write("\n" + "".join(f"{printable(pair['sentence'])}\n" for pair in shown))
        if len(shown) < len(pairs):
            sys.stdout.write(f"({len(pairs):,} pairs in all: --json or --page)\n")
    sys.stdout.write("\n")


def print_conversion(report: dict[str, Any]) -> None:
    """Print what was converted, and the proofs."""
    rows = [
        ["model", f"{report['model']}, {report['parameters']:,} parameters"],
        ["from", f"{report['from']}, {report['tensors']} tensors, all matched"],
        *_source_rows(report["source"]),
        *([["left out", ", ".join(report["left_out"])]] if report["left_out"] else []),
        ["to", f"{report['to']}, {report['destination']}"],
        *(["proof", _spoken_proof(proof)] for proof in report["proofs"]),
    ]
    print_table(None, rows)


def _source_rows(source: dict[str, Any] | None) -> list[list[str]]:
    if source is None:
        return []
    hashes = [["SHA-256", f"{digest} ({name})"] for name, digest in source["sha256"].items()]
    return [["source", source["address"]], *hashes]


def _spoken_proof(proof: dict[str, Any]) -> str:
    if "not_verified" in proof:
        return f"not verified with {proof['library']}: {proof['not_verified']}"
    same = f", equal answers {proof['equal_answers']} of {proof['pictures']}" if "equal_answers" in proof else ""
    return (
        f"{proof['library']} on {proof['pictures']} images: largest difference of {proof['compared']}"
        f" {proof['largest_difference']:.1e} (of {proof['largest_value']:.3g}){same}"
    )


def prediction_table(
    paths: Sequence[str], labels: Sequence[str], *, blank: str = ""
) -> Callable[[dict[str, Any]], None]:
    """Return a function that prints a row; `blank` stands for no prediction, otherwise there is no row. Column
    widths follow from the names, so rows can be printed one by one."""
    first = max(_columns(printable(path)) for path in paths)
    second = min(max(_columns(printable(label)) for label in labels or "-"), 40) + len(" 0.123")

    def show(answer: dict[str, Any]) -> None:
        if answer.get("predictions") == [] and not blank:  # features alone
            return
        words = [f"{one['label']} {one['score']:.3f}" for one in answer.get("predictions", ())]
        cells = (
            [f"error: {answer['error']}", ""]
            if "error" in answer
            else ["".join(words[:1]) or blank, ", ".join(words[1:])]
        )
        file, best, rest = map(printable, (answer["file"], *cells))
        gaps = [" " * max(wide - _columns(text), 0) for wide, text in ((first, file), (second, best))]
        sys.stdout.write(f"{file}{gaps[0]}  {best}{gaps[1]}  {rest}".rstrip() + "\n")

    return show


def _columns(text: str) -> int:
    """Width of a text on a terminal, in columns."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def printable(text: str) -> str:
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


def setting_cell(value: Any) -> str:
    """A setting in the notation of recipes and `--set`."""
    match value:
        case None:
            return "-"
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:g}"
        case list():
            return f"[{', '.join(map(setting_cell, value))}]"
    return str(value)


def cell(value: Any) -> str:
    """A setting as a table shows it."""
    match value:
        case None:
            return "-"
        case [height, width]:
            return f"{height}x{width}"
        case int():
            return f"{value:,}"
    return str(value)
