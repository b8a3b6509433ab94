"""The machine that a lab runs on. Times and the last bits of results depend on it."""

import functools
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from vitrail import __version__


def describe_machine() -> dict[str, Any]:
    """Return the processor and the versions that times depend on."""
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "features": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "vitrail": __version__,
    }


def _processor_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.machine()


@functools.cache
def machine_name() -> str:
    """Return a short name of this machine, stored with every result: a lab can be resumed on another machine."""
    return f"{_processor_name()}, {torch.backends.cpu.get_cpu_capability()}"
