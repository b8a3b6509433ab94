"""Processes that tests kill or signal, forked from a server process that has imported torch once.

A new interpreter takes two seconds to import torch. `start_vitrail` is `subprocess.Popen` of `python -m vitrail`
without these seconds; each pytest worker has one server, which ends with it.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitrail.cli import main

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["vitrail.api.training_commands", "vitrail.training.run", "vitrail.reports.run_report"])


class ForkedProcess:
    """A process with the methods of `subprocess.Popen` that tests use. Its output is kept in files until it ends."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]):
        self._folder = Path(tempfile.mkdtemp())
        self._process = _CONTEXT.Process(target=_run, args=(function, arguments, dict(environment), self._folder))
        self._process.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end of the process, and return the text that it wrote to stdout and to stderr."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked process", timeout or 0)
        texts = self.read_output()
        shutil.rmtree(self._folder)
        return texts

    def read_output(self) -> tuple[str, str]:
        """Return what the process has written to stdout and to stderr so far."""
        paths = (self._folder / name for name in ("stdout", "stderr"))
        stdout, stderr = (path.read_text(encoding="utf-8") if path.exists() else "" for path in paths)
        return stdout, stderr


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], folder: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    function(*arguments)


def start_function(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> ForkedProcess:
    """Start a process that calls a function of a test module."""
    return ForkedProcess(function, arguments, os.environ if environment is None else environment)


def run_function(function: Callable[..., Any], *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Call a function of a test module in a process of its own, and wait for its end."""
    process = start_function(function, *arguments)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode or 0, out, err)


def _run_vitrail(*arguments: str) -> None:
    sys.argv = ["vitrail", *arguments]
    main(list(arguments))


def start_vitrail(*arguments: object) -> ForkedProcess:
    """Start a process that runs a command of Vitrail."""
    return start_function(_run_vitrail, *map(str, arguments))
