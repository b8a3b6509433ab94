"""Child process of the sandbox, started by `convert_pickle`: convert an untrusted pickle to a plain file.

    python -I child.py READER SOURCE TARGET BYTES PATH...

A pickle can run code, so this process has no network, cannot start processes, and can use at most BYTES of memory, or
less if a file of SOURCE's size needs less. READER is a Python file with two functions: `prepare()` imports packages
before the restrictions apply; `convert(source, target, refuse)` reads SOURCE, writes TARGET and returns a report, or
calls `refuse` with a reason. PATHs are the folders of installed packages, because an isolated interpreter ignores
PYTHONPATH. The process imports nothing from vitrail. Exit code 3 means refused, with the reason on stderr; 0 means
success, with the report as JSON on stdout.
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
_SPARE_MEMORY = 2**28  # bytes in addition to the content


def main(reader: str, source: Path, target: Path, memory: int, search_path: list[str]) -> None:
    """Convert the pickle `source` to the file `target` with the functions of `reader`, and print the report."""
    is_cut = cut_network()
    sys.path += search_path
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
    """Forbid new processes, and limit the memory of this one.

    The limit is the available memory, or less for a small file: its content is at most four times as large as the file,
    and is read, copied and written.
    """
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        used = 0
    maximum = used + min(memory, 16 * size + _SPARE_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (maximum, maximum))


def refuse(reason: str) -> NoReturn:
    """Exit with code 3 and the reason."""
    sys.stderr.write(reason.strip().splitlines()[0][:300])
    sys.exit(REFUSED)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
