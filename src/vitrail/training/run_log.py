"""The log of a run: what happens goes to its observers. Only the first rank has any."""

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
    """Appends lines. If the disk is full, a line is lost and the run goes on."""

    def __init__(self, path: Path, tell: Say) -> None:
        self._file, self._tell = path.open("a+b", buffering=0), tell
        self._is_torn = _ends_torn(self._file)
        self._lost = 0

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        line = json_text({"event": event, **fields}, default=str).encode() + b"\n"
        try:
            self._append(b"\n" + line if self._is_torn else line)
            self._is_torn = False
        except OSError as error:
            self._is_torn = True
            self._lost += 1
            if self._lost == 1:
                self._tell(f"warning: metrics.jsonl cannot be written ({error.strerror}). Training goes on.")

    def _append(self, line: bytes) -> None:
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._lost:
            self._tell(f"warning: {pluralise(self._lost, 'line')} of metrics.jsonl could not be written")
        self._file.close()


def _ends_torn(file: BinaryIO) -> bool:
    """Whether a killed run left an incomplete last line."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


class RunLog:
    """Sends events, progress and results to the progress line, `metrics.jsonl`, TensorBoard's events and other
    observers."""

    def __init__(self, folder: Path, total: int, *, writes: bool, tell: Say = say) -> None:
        self._line = ProgressLine(total, tell if writes else say_nothing)
        self._observers: list[Observer] = []
        if writes:
            metrics = MetricsLog(folder / "metrics.jsonl", self.say)
            self._observers += [self._line, metrics, EventFile(folder)]

    def add(self, observer: Observer) -> None:
        """Add an observer, on the first rank."""
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
        """Record an event. Numbers that are not finite become None."""
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in fields.items()
        }
        for observer in self._observers:
            observer.record(event, plain)

    def step(self, number: int) -> None:
        """Before the first step and after each."""
        for observer in self._observers:
            observer.step(number)

    def progress(self, step: int, numbers: dict[str, float], held_out: str = "") -> None:
        """Report progress. `held_out` is the objective's summary of the held-out images ("accuracy 93.4%")."""
        for observer in self._observers:
            observer.progress(step, numbers, held_out)

    def update(self, position: RunProgress) -> None:
        """After evaluations and checkpoints."""
        for observer in self._observers:
            observer.update(position)

    def finish(self, outcome: FinishedRun) -> None:
        """The run is over and its bundle is written."""
        for observer in self._observers:
            observer.finish(outcome)

    @contextlib.contextmanager
    def failures(self, position: Callable[[], RunProgress]) -> Generator[None]:
        """Context in which observers are told of the error that ends the run."""
        try:
            yield
        except BaseException as error:
            for observer in self._observers:
                observer.fail(position(), error)
            raise
