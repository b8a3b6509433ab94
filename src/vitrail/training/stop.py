"""Signals that end a run after the current step and a checkpoint."""

import contextlib
import signal
import threading
from collections.abc import Generator

from vitrail.core.errors import VitrailError


class Interrupted(VitrailError):
    """A signal ended the run after a complete step and a checkpoint."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


class StopSignal:
    """Signal handler that stores the number of the last signal (0 for none) until the training loop reads it.

    The loop reads it after each step. A second Ctrl-C raises KeyboardInterrupt immediately.
    """

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self, number: int, _frame: object) -> None:
        if self.signal == number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number

    @contextlib.contextmanager
    def catch(self) -> Generator["StopSignal"]:
        """Handle SIGTERM and SIGINT in the `with` block, and SIGHUP unless it is ignored (nohup)."""
        # Python allows signal handlers only in the main thread. Training in another thread cannot be interrupted.
        is_main = threading.current_thread() is threading.main_thread()
        numbers = [signal.SIGTERM, signal.SIGINT] if is_main else []
        if is_main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, self) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
