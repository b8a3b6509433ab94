"""Available memory: checks before large allocations, and messages for allocations that failed."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from vitrail.core.errors import CorruptFileError, OutOfMemoryError

LARGE_ALLOCATION = 2**26
"""Number of bytes up to which allocations are not checked."""

# Messages of torch (CPU, CUDA, MPS), ONNX Runtime, C++ and the loader of shared libraries.
_ALLOCATION_FAILURE = re.compile(
    r"DefaultCPUAllocator|out of memory|unable to allocate|failed to allocate|cannot allocate memory|bad.?alloc"
    r"|failed to map segment",
    re.IGNORECASE,
)
_AMOUNT = re.compile(r"(?:to|unable to|failed to) allocate ([\d.,]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)


def available_memory() -> int:
    """Return the number of bytes that this process can still allocate without swapping.

    This is the available memory of the machine, or less if a control group or `ulimit -v` limits the process.
    """
    return max(min(_free_of_machine(), *_free_of_cgroups(), *_free_of_process()), 0)


def check_unpacked_size(size: int, path: Path) -> None:
    """Raise CorruptFileError if the content of a file would not fit into the available memory.

    A small compressed file may state any size.
    """
    free = available_memory()
    if size > free:
        raise CorruptFileError(path=path, cause=f"would fill {size:,} bytes of memory; {free:,} are available")


def check_allocation(size: int, subject: str) -> None:
    """Raise OutOfMemoryError if `size` bytes are not available. Otherwise the kernel might kill the process."""
    if size > LARGE_ALLOCATION and size > (free := available_memory()):
        raise OutOfMemoryError(
            f"{subject} must fit into memory: it needs {format_bytes(size)}, got {format_bytes(free)} available. Use a"
            " smaller model, or close other programs."
        )


def is_allocation_failure(error: BaseException) -> bool:
    """Return whether Python, numpy, torch or another library raised an error because an allocation failed."""
    return isinstance(error, MemoryError) or bool(_ALLOCATION_FAILURE.search(str(error)))


def describe_allocation_failure(error: BaseException) -> str:
    """Return a phrase with the amount that could not be allocated, if the error states it, and the available memory."""
    amount = _AMOUNT.search(str(error))
    size = "more memory" if amount is None else amount[1]
    if plain := re.fullmatch(r"(\d+) bytes", size):
        size = format_bytes(int(plain[1]))
    return f"{size} could not be allocated; {format_bytes(available_memory())} are available on the CPU"


def format_bytes(size: float) -> str:
    """Return a number of bytes as text, such as "6.1 GB"."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def _free_of_machine() -> int:
    """Return the machine's available memory in bytes; the total memory on systems other than Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_of_cgroups(groups: Path = Path("/proc/self/cgroup"), tree: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the bytes that each control group (version 1 or 2) of this process still allows."""
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
        group = root / path.lstrip("/")
        # A container may show its own group as the root, or at its path in the machine's tree.
        for folder in {group, *group.parents}:
            if folder.is_relative_to(root):
                try:
                    cache = re.search(r"^(?:total_)?inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.M)
                    used = int((folder / usage).read_text()) - (int(cache[1]) if cache else 0)
                    yield int((folder / limit).read_text()) - used
                except (OSError, ValueError):  # the group is missing, or unlimited ("max")
                    continue


def _free_of_process() -> Iterator[int]:
    """Yield the bytes that the limit of the address space still allows; nothing without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError):
            pages = 0
        yield limit - pages * resource.getpagesize()
