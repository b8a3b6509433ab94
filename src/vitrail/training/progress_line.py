"""The progress line of a training run: a bar in a terminal, an updated line in a notebook, otherwise plain lines."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vitrail.core.language import localise
from vitrail.core.terminal import (
    MessageStream,
    NotebookLine,
    Say,
    display_width,
    escape_unprintable,
    format_duration,
    in_notebook,
    say,
)
from vitrail.training.observer import Observer

_PLAIN_SECONDS = 10  # interval between plain lines
_NOTEBOOK_SECONDS = 0.2  # interval between updates of the line in a notebook
_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 5, 40  # columns


class ProgressLine(Observer):
    """Observer that prints progress with `tell`.

    If `tell` is the default `say`, terminals show a progress bar and notebooks a line that is updated in place.
    """

    def __init__(self, total: int, tell: Say) -> None:
        self.total, self._tell = total, tell
        self._start_time = self._last_print_time = time.monotonic()
        self._first_step: int | None = None
        self._progress: Progress | None = None
        self._notebook: NotebookLine | None = None
        if tell is say and in_notebook():
            self._notebook = NotebookLine()
        elif tell is say and sys.stderr.isatty():
            self._bar = BarColumn()
            columns = (TextColumn("{task.completed}/{task.total}"), self._bar, TextColumn("{task.description}"))
            console = Console(file=MessageStream(sys.stderr))  # ty: ignore[invalid-argument-type]
            self._progress = Progress(*columns, console=console, transient=False)
            self._task = self._progress.add_task("", total=self.total)
            self._progress.start()

    def close(self) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, line: str) -> None:
        """Print a line to stderr, above the progress bar if there is one."""
        if self._progress:
            self._progress.console.print(escape_unprintable(localise(line)), markup=False, highlight=False)
        else:
            self._tell(line)

    def progress(self, step: int, numbers: Mapping[str, float], held_out: str) -> None:
        """Show the step, loss, learning rate, images per second, remaining time and the latest held-out score.

        The command line prints them in the language of the user.
        """
        now = time.monotonic()
        if self._first_step is None:
            self._first_step, self._start_time = step, now
        steps_done = step - self._first_step
        parts = {
            "loss": f"loss {numbers['loss']:.4f}",
            "rate": f"lr {numbers['learning_rate']:.2e}",
            "speed": f"{numbers['images_per_second']:,.0f} images/s",
        }
        if steps_done:
            seconds = (now - self._start_time) / steps_done * (self.total - step)
            parts["remaining"] = f"{format_duration(seconds)} left"
        if self._progress:
            if held_out:
                parts["held-out"] = f"held-out {held_out.rpartition(' ')[2]}"
            parts = {name: localise(part) for name, part in parts.items()}
            width = self._progress.console.width - len(f"{step}/{self.total}") - 2
            line, self._bar.bar_width = _fit_parts(parts, width)
            self._progress.update(self._task, completed=step, description=line)
            return
        interval = _PLAIN_SECONDS if self._notebook is None else _NOTEBOOK_SECONDS
        if now - self._last_print_time >= interval or step == self.total:
            self._last_print_time = now
            if held_out:
                parts["held-out"] = f"held-out {held_out}"
            line = "  ".join(map(localise, (f"step {step}/{self.total}", *parts.values())))
            self.say(line) if self._notebook is None else self._notebook.show(line, step / self.total)


def _fit_parts(parts: dict[str, str], width: int) -> tuple[str, int]:
    """Return the text of the parts that fit next to a bar, dropping less important ones first, and the bar's width."""
    parts = dict(parts)
    for name in ("rate", "speed", "held-out", "loss"):
        if display_width("  ".join(parts.values())) + _MIN_BAR_WIDTH <= width:
            break
        parts.pop(name, None)
    line = "  ".join(parts.values())
    return line, min(max(width - display_width(line), _MIN_BAR_WIDTH), _MAX_BAR_WIDTH)
