"""The progress line of a run: a bar in a terminal, one changing line in a notebook, otherwise a line now and then."""

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vitrail.core.terminal import (
    MessageStream,
    NotebookLine,
    Say,
    escape_unprintable,
    format_duration,
    in_notebook,
    say,
)
from vitrail.training.observer import Observer

_PLAIN_SECONDS = 10  # between plain lines
_NOTEBOOK_SECONDS = 0.2  # between changes of a notebook's line
_SHORTEST_BAR, _LONGEST_BAR = 5, 40  # columns


class ProgressLine(Observer):
    """Shows progress by `tell`. If that is the usual one, a terminal gets a bar and a notebook a changing line."""

    def __init__(self, total: int, tell: Say) -> None:
        self.total, self._tell = total, tell
        self._began = self._spoken = time.monotonic()
        self._first: int | None = None
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
        """Print a line to stderr."""
        if self._progress:
            self._progress.console.print(escape_unprintable(line), markup=False, highlight=False)
        else:
            self._tell(line)

    def progress(self, step: int, numbers: Mapping[str, float], held_out: str) -> None:
        """Print steps, loss, learning rate, images per second, remaining time, and the held-out images."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._began = step, now
        done = step - self._first
        parts = {
            "loss": f"loss {numbers['loss']:.4f}",
            "rate": f"lr {numbers['learning_rate']:.2e}",
            "speed": f"{numbers['images_per_second']:,.0f} images/s",
        }
        if done:
            parts["left"] = f"{format_duration((now - self._began) / done * (self.total - step))} left"
        if self._progress:
            if held_out:
                parts["held-out"] = f"held-out {held_out.rpartition(' ')[2]}"
            room = self._progress.console.width - len(f"{step}/{self.total}") - 2
            line, self._bar.bar_width = _fit(parts, room)
            self._progress.update(self._task, completed=step, description=line)
            return
        between = _PLAIN_SECONDS if self._notebook is None else _NOTEBOOK_SECONDS
        if now - self._spoken >= between or step == self.total:
            self._spoken = now
            if held_out:
                parts["held-out"] = f"held-out {held_out}"
            line = f"step {step}/{self.total}  {'  '.join(parts.values())}"
            self.say(line) if self._notebook is None else self._notebook.show(line, step / self.total)


def _fit(parts: dict[str, str], room: int) -> tuple[str, int]:
    """The parts that fit beside a bar, dropping the least important first, and the width of the bar."""
    kept = dict(parts)
    for name in ("rate", "speed", "held-out", "loss"):
        if len("  ".join(kept.values())) + _SHORTEST_BAR <= room:
            break
        kept.pop(name, None)
    line = "  ".join(kept.values())
    return line, min(max(room - len(line), _SHORTEST_BAR), _LONGEST_BAR)
