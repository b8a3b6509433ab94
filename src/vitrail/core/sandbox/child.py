"""The child process of the sandbox, started by `convert_pickle`: lets a reader convert an untrusted pickle.

    python -I child.py READER SOURCE TARGET BYTES PLACE...

A pickle can run code, so it is read by a restricted process: it has no network, cannot start processes, and can use no
more than BYTES of memory, nor more than a file of SOURCE's size needs. READER is a file of Python with two functions:
`prepare()` imports what it needs, before the walls are up; `convert(source, target, refuse)` reads SOURCE, writes
TARGET and returns a report, or calls `refuse` with a reason. PLACEs are the paths of installed packages, because an
isolated interpreter ignores PYTHONPATH. Nothing of vitrail is imported. Exit code 3 means refused, with the reason on
stderr; 0 means success, with the report as JSON on stdout.
"""

import ctypes
import json
import resource
import runpy
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

REFUSED = 3

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
_SPARE = 2**28  # bytes beyond what the content takes


def main(reader: str, source: Path, target: Path, memory: int, places: list[str]) -> None:
    """Let the reader convert `source` to `target`, and print its report."""
    is_cut = cut_network()
    sys.path += places
    functions = runpy.run_path(reader)
    functions["prepare"]()
    forbid_sockets()
    limit(memory, source.stat().st_size)
    report = functions["convert"](source, target, refuse)
    sys.stdout.write(json.dumps({"cut": is_cut, **report}))


def cut_network() -> bool:
    """Move into a network namespace without interfaces, if the kernel supports and allows it."""
    kernel = ctypes.CDLL(None)
    return hasattr(kernel, "unshare") and (
        kernel.unshare(_NEW_NETWORK) == 0 or kernel.unshare(_NEW_USER | _NEW_NETWORK) == 0
    )


def forbid_sockets() -> None:
    """Make Python's sockets unusable. (Called after imports, because those of torch subclass them.)"""

    def no_socket(*_: Any, **__: Any) -> NoReturn:
        raise OSError("no network here")

    vars(socket)["socket"] = no_socket


def limit(memory: int, size: int) -> None:
    """Forbid further processes, and limit memory to what is available and to what a file of this size can need: it is
    read, its content is copied and written, and that is at most four times as large as the file."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        used = 0
    most = used + min(memory, 16 * size + _SPARE)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def refuse(reason: str) -> NoReturn:
    """Exit with code 3 and the reason."""
    sys.stderr.write(reason.strip().splitlines()[0][:300])
    sys.exit(REFUSED)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
