"""A line on stderr that names the step a command is stuck in, after a minute without progress.

Threads state their step with `step`. One thread for all of them sleeps until the oldest step would be a minute old. It
ends nothing: a step may only be slow. It needs Python's lock like any other thread, so a library that keeps it for ever
silences this one, too.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from vitrail.core.terminal import say

_PATIENCE = 60.0  # seconds


class _Step(NamedTuple):
    """What a thread is doing."""

    describe: Callable[[], str]
    began: float
    """When it began, in seconds of the monotonic clock."""


@contextlib.contextmanager
def step(describe: Callable[[], str]) -> Generator[None]:
    """A block that takes a moment, such as decoding an image. `describe` names it, if it takes longer than a minute."""
    current = _Step(describe, time.monotonic())
    _watch.steps[id(current)] = current
    _watch.start()
    try:
        yield
    finally:
        _watch.steps.pop(id(current), None)  # reported already, or of the process that this one was forked from


class _Watch:
    """The thread that looks after steps. It begins with the first one and ends with the process."""

    def __init__(self) -> None:
        self.steps: dict[int, _Step] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._patience = _patience()

    def start(self) -> None:
        """Begin to watch, unless that is done already."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="vitrail-watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        patience = self._patience
        while True:
            now = time.monotonic()
            for key, late in self.steps.copy().items():
                if now - late.began >= patience and self.steps.pop(key, None) is not None:
                    say(f"note: no progress for {patience:g} s: {late.describe()}")
            ages = [now - waiting.began for waiting in self.steps.copy().values()]
            time.sleep(max(patience - max(ages, default=0.0), 0.01))


def _patience() -> float:
    """Seconds: $VITRAIL_PATIENCE, if that is a number above zero, otherwise 60."""
    try:
        seconds = float(os.environ.get("VITRAIL_PATIENCE", ""))
    except ValueError:
        return _PATIENCE
    return seconds if 0 < seconds < threading.TIMEOUT_MAX else _PATIENCE


_watch = _Watch()


def _begin_anew() -> None:
    """A fork has no thread of its parent."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_begin_anew)
