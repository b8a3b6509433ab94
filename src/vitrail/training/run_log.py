"""The log of a run: progress line, `metrics.jsonl`, TensorBoard events. Only the first rank writes."""

import contextlib
import errno
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from vitrail.core.settings import counted
from vitrail.core.terminal import (
    Messages,
    NotebookLine,
    Say,
    clock,
    in_notebook,
    json_text,
    printable,
    say,
    say_nothing,
)
from vitrail.training.tensorboard import EventFile

_PLAIN_SECONDS = 10  # between plain lines
_NOTEBOOK_SECONDS = 0.2  # between changes of a notebook's line
_SHORTEST_BAR, _LONGEST_BAR = 5, 40  # columns


class RunLog:
    """Writes a JSON line for every event, scalars for TensorBoard, and a progress line."""

    def __init__(self, folder: Path, total: int, *, writes: bool, tell: Say = say) -> None:
        self.total, self.writes = total, writes
        self._tell = tell if writes else say_nothing
        self._began = self._spoken = time.monotonic()
        self._first: int | None = None
        self._progress: Progress | None = None
        self._notebook: NotebookLine | None = None
        if writes:
            self._metrics = (folder / "metrics.jsonl").open("a+b", buffering=0)
            self._is_torn = _ends_torn(self._metrics)
            self._events = EventFile(folder)
            self._lost = 0

    def __enter__(self) -> Self:
        if self._tell is say and in_notebook():
            self._notebook = NotebookLine()
        elif self._tell is say and sys.stderr.isatty():
            self._bar = BarColumn()
            columns = (TextColumn("{task.completed}/{task.total}"), self._bar, TextColumn("{task.description}"))
            console = Console(file=Messages(sys.stderr))  # ty: ignore[invalid-argument-type]
            self._progress = Progress(*columns, console=console, transient=False)
            self._task = self._progress.add_task("", total=self.total)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()
        if self.writes:
            if self._lost:
                self.say(f"warning: {counted(self._lost, 'line')} of metrics.jsonl could not be written")
            self._metrics.close()
            self._events.close()

    def write(self, event: str, **fields: Any) -> None:
        """Write a line of `metrics.jsonl`. Non-finite numbers become null. If the disk is full, the line is lost."""
        if not self.writes:
            return
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }
        line = json_text({"event": event, **plain}, default=str).encode() + b"\n"
        try:
            self._append(b"\n" + line if self._is_torn else line)
            self._is_torn = False
        except OSError as error:
            self._is_torn = True
            self._lost += 1
            if self._lost == 1:
                self.say(f"warning: metrics.jsonl cannot be written ({error.strerror}). Training goes on.")
            return
        scalars = {
            f"{event}/{key}": float(value)
            for key, value in plain.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "seconds")
        }
        if scalars and "step" in fields and event in ("step", "evaluate"):
            with contextlib.suppress(OSError):
                self._events.add(fields["step"], scalars)

    def _append(self, line: bytes) -> None:
        if self._metrics.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def say(self, line: str) -> None:
        """Print a line to stderr."""
        if self._progress:
            self._progress.console.print(printable(line), markup=False, highlight=False)
        else:
            self._tell(line)

    def progress(self, step: int, fields: dict[str, float], held_out: str = "") -> None:
        """Print progress: steps, loss, learning rate, images per second, remaining time, and the objective's summary of
        the held-out images ("accuracy 93.4%")."""
        if not self.writes:
            return
        now = time.monotonic()
        if self._first is None:
            self._first, self._began = step, now
        done = step - self._first
        parts = {
            "loss": f"loss {fields['loss']:.4f}",
            "rate": f"lr {fields['learning_rate']:.2e}",
            "speed": f"{fields['images_per_second']:,.0f} images/s",
        }
        if done:
            parts["left"] = f"{clock((now - self._began) / done * (self.total - step))} left"
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


def _ends_torn(file: BinaryIO) -> bool:
    """Whether a killed run left an incomplete last line."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
