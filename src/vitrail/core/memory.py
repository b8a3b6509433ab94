"""Available memory, to refuse what would not fit into it and to explain allocations that failed."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from vitrail.core.errors import CorruptFileError, OutOfMemoryError

_NOT_CHECKED = 2**26  # bytes: less is allocated without asking how much is available

# What torch (CPU, CUDA, MPS), ONNX Runtime, C++ and the loader of shared libraries say.
_FAILURES = re.compile(
    r"DefaultCPUAllocator|out of memory|unable to allocate|failed to allocate|cannot allocate memory|bad.?alloc"
    r"|failed to map segment",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"(?:to|unable to|failed to) allocate ([\d.,]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)


def available_memory() -> int:
    """Bytes that this process can still use: the machine's memory without swapping, within the limits of its control
    groups and of its address space (`ulimit -v`)."""
    return max(min(_free_of_machine(), *_free_of_cgroups(), *_free_of_process()), 0)


def check_unpacked_size(size: int, path: Path) -> None:
    """Refuse a file whose content would take more than the available memory: a small compressed file may state any
    size."""
    free = available_memory()
    if size > free:
        raise CorruptFileError(path=path, cause=f"would fill {size:,} bytes of memory; {free:,} are available")


def check_allocation(size: int, subject: str) -> None:
    """Refuse to allocate more than the available memory, before the kernel ends the process for it."""
    if size > _NOT_CHECKED and size > (free := available_memory()):
        raise OutOfMemoryError(
            f"{subject} must fit into memory: it needs {format_bytes(size)}, got {format_bytes(free)} available. Use a"
            " smaller model, or close other programs."
        )


def is_allocation_failure(error: BaseException) -> bool:
    """Whether Python, numpy, torch or another library raised this because memory could not be allocated."""
    return isinstance(error, MemoryError) or bool(_FAILURES.search(str(error)))


def describe_allocation_failure(error: BaseException) -> str:
    """The amount that could not be allocated, if the error states it, and what is available."""
    amount = _AMOUNT.search(str(error))
    size = "more memory" if amount is None else amount[1]
    if plain := re.fullmatch(r"(\d+) bytes", size):
        size = format_bytes(int(plain[1]))
    return f"{size} could not be allocated; {format_bytes(available_memory())} are available on the CPU"


def format_bytes(size: float) -> str:
    """A number of bytes, as in "6.1 GB"."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _free_of_machine() -> int:
    """Linux: without swapping; elsewhere the machine's total memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_of_cgroups(groups: Path = Path("/proc/self/cgroup"), tree: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each control group of this process still allows: of version 2 and of version 1."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = tree / controllers
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        own = root / path.lstrip("/")
        # A container may show its own group as the root, or its place in the machine's tree.
        for folder in {own, *own.parents}:
            if folder.is_relative_to(root):
                try:
                    cache = re.search(r"^(?:total_)?inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
                    used = int((folder / usage).read_text()) - (int(cache[1]) if cache else 0)
                    yield int((folder / limit).read_text()) - used
                except (OSError, ValueError):  # no such group, or "max": no limit
                    continue


def _free_of_process() -> Iterator[int]:
    """What the limit of the address space leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError):
            pages = 0
        yield limit - pages * resource.getpagesize()
