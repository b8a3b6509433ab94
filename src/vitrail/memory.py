"""Available memory, to refuse what would not fit into it."""

import os
from pathlib import Path

from vitrail.errors import DamagedError


def available() -> int:
    """Bytes available without swapping (Linux); elsewhere the machine's total memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_more(size: int, path: Path) -> None:
    """Refuse a file whose content would take more than the available memory: a small compressed file may state any
    size."""
    free = available()
    if size > free:
        raise DamagedError(path=path, cause=f"would fill {size:,} bytes of memory; {free:,} are available")
