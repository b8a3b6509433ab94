"""Signals that end a run after the current step, with a checkpoint."""

import contextlib
import signal
import threading
from collections.abc import Generator

from vitrail.core.errors import VitrailError


class Interrupted(VitrailError):
    """A signal ended the run after a complete step, with a checkpoint."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


class Stop:
    """Stores a signal until the step is done. A second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self, number: int, _frame: object) -> None:
        if self.signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    @contextlib.contextmanager
    def watching(self) -> Generator["Stop"]:
        """Context that handles SIGTERM, SIGINT and SIGHUP, unless the latter is ignored (nohup)."""
        # Python has signals in its main thread alone; in others, training goes on to its end.
        is_main = threading.current_thread() is threading.main_thread()
        caught = [signal.SIGTERM, signal.SIGINT] if is_main else []
        if is_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            caught.append(signal.SIGHUP)
        before = {number: signal.signal(number, self) for number in caught}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
