"""The log of a run, which passes events to observers. Only the first rank has observers."""

import contextlib
import errno
import math
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from vitrail.core.settings import pluralise
from vitrail.core.terminal import Say, json_text, say, say_nothing
from vitrail.training.observer import FinishedRun, Observer, RunProgress
from vitrail.training.progress_line import ProgressLine
from vitrail.training.tensorboard import EventFile


class MetricsLog(Observer):
    """Observer that appends a JSON line per event to `metrics.jsonl`.

    If the disk is full, lines are lost and training continues.
    """

    def __init__(self, path: Path, tell: Say) -> None:
        self._file, self._tell = path.open("a+b", buffering=0), tell
        self._is_line_incomplete = _has_incomplete_line(self._file)
        self._lost_lines = 0

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        line = json_text({"event": event, **fields}, default=str).encode() + b"\n"
        try:
            self._append(b"\n" + line if self._is_line_incomplete else line)
            self._is_line_incomplete = False
        except OSError as error:
            self._is_line_incomplete = True
            self._lost_lines += 1
            if self._lost_lines == 1:
                self._tell(f"warning: metrics.jsonl cannot be written ({error.strerror}). Training continues.")

    def _append(self, line: bytes) -> None:
        """Write a line. A disk that takes only a part of it raises OSError."""
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._lost_lines:
            self._tell(f"warning: {pluralise(self._lost_lines, 'line')} of metrics.jsonl could not be written")
        self._file.close()


def _has_incomplete_line(file: BinaryIO) -> bool:
    """Return whether the last line of the file lacks its newline, because the process was killed."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


class RunLog:
    """Passes events, progress and results of a run to its observers.

    These are the progress line, `metrics.jsonl`, the TensorBoard event file and any that are added.
    """

    def __init__(self, folder: Path, total: int, *, writes: bool, tell: Say = say) -> None:
        self._line = ProgressLine(total, tell if writes else say_nothing)
        self._observers: list[Observer] = []
        if writes:
            metrics = MetricsLog(folder / "metrics.jsonl", self.say)
            self._observers += [self._line, metrics, EventFile(folder)]

    def add_observer(self, observer: Observer) -> None:
        """Add an observer. Call this on the first rank only."""
        self._observers.append(observer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for observer in self._observers:
            observer.close()

    def say(self, line: str) -> None:
        """Print a line to stderr."""
        self._line.say(line)

    def write(self, event: str, **fields: Any) -> None:
        """Pass an event with its fields to all observers. Numbers that are not finite become None."""
        json_fields = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }
        for observer in self._observers:
            observer.record(event, json_fields)

    def step(self, number: int) -> None:
        """Tell all observers the number of steps done. Called before the first step and after each step."""
        for observer in self._observers:
            observer.step(number)

    def progress(self, step: int, numbers: dict[str, float], held_out: str = "") -> None:
        """Pass progress to all observers. `held_out` is the summary of the latest evaluation ("accuracy 93.4%")."""
        for observer in self._observers:
            observer.progress(step, numbers, held_out)

    def update(self, position: RunProgress) -> None:
        """Tell all observers how far the run is. Called after evaluations and checkpoints."""
        for observer in self._observers:
            observer.update(position)

    def finish(self, outcome: FinishedRun) -> None:
        """Tell all observers that the run has ended and its bundle is written."""
        for observer in self._observers:
            observer.finish(outcome)

    @contextlib.contextmanager
    def report_failures(self, position: Callable[[], RunProgress]) -> Generator[None]:
        """Context manager that passes an exception of its block to all observers before raising it again."""
        try:
            yield
        except BaseException as error:
            for observer in self._observers:
                observer.fail(position(), error)
            raise
