"""`metrics.jsonl`: a JSON line for every event of a run."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vitrail.core.settings import counted
from vitrail.core.terminal import Say, json_text
from vitrail.training.observer import Observer


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
            self._tell(f"warning: {counted(self._lost, 'line')} of metrics.jsonl could not be written")
        self._file.close()


def _ends_torn(file: BinaryIO) -> bool:
    """Whether a killed run left an incomplete last line."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
