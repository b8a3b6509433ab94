"""A watchdog that prints a note on stderr when a step makes no progress for a minute.

Threads enclose their steps in `watch_step`. One daemon thread watches the steps of all threads: it sleeps until the
oldest step is a minute old, then prints a description of that step. It does not end the step, which may only be slow.
It needs the interpreter lock, so it is blocked by a library that never releases the lock.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import NamedTuple

from vitrail.core.terminal import say

_DEFAULT_PATIENCE = 60.0  # seconds


class _Step(NamedTuple):
    """A step that a thread is executing."""

    describe: Callable[[], str]
    start_time: float
    """In seconds of the monotonic clock."""


@contextlib.contextmanager
def watch_step(describe: Callable[[], str]) -> Generator[None]:
    """Watch a block such as the decoding of one image; after a minute, print the text that `describe` returns."""
    step = _Step(describe, time.monotonic())
    _watchdog.steps[id(step)] = step
    _watchdog.start()
    try:
        yield
    finally:
        _watchdog.steps.pop(id(step), None)  # missing if it was reported, or started before a fork


class _Watchdog:
    """The thread that watches steps. It starts with the first step and ends with the process."""

    def __init__(self) -> None:
        self.steps: dict[int, _Step] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._patience = _read_patience()

    def start(self) -> None:
        """Start the thread if it is not running."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch_steps, name="vitrail-watchdog", daemon=True)
                self._thread.start()

    def _watch_steps(self) -> None:
        patience = self._patience
        while True:
            now = time.monotonic()
            for key, step in self.steps.copy().items():
                if now - step.start_time >= patience and self.steps.pop(key, None) is not None:
                    say(f"note: no progress for {patience:g} s: {step.describe()}")
            ages = [now - step.start_time for step in self.steps.copy().values()]
            time.sleep(max(patience - max(ages, default=0.0), 0.01))


def _read_patience() -> float:
    """Return $VITRAIL_PATIENCE in seconds if it is a number above zero, otherwise 60."""
    try:
        seconds = float(os.environ.get("VITRAIL_PATIENCE", ""))
    except ValueError:
        return _DEFAULT_PATIENCE
    return seconds if 0 < seconds < threading.TIMEOUT_MAX else _DEFAULT_PATIENCE


_watchdog = _Watchdog()


def _replace_watchdog() -> None:
    """Make a new watchdog in a forked child process, where the threads of the parent do not run."""
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_replace_watchdog)
