"""A separate program, started by `weights.files`: converts the tensors of a pickle to a safetensors file.

    python -I unpickle.py SOURCE TARGET BYTES PLACE...

A pickle can run code, so it is read with `weights_only=True` by a restricted process: it has no network, cannot start
processes, and can use no more than BYTES of memory, nor more than a file of SOURCE's size needs. PLACEs are the paths
of torch, because an isolated interpreter ignores PYTHONPATH. Nothing of vitrail is imported. Exit code 3 means refused,
with the reason on stderr; 0 means success, with a JSON report on stdout.
"""

import ctypes
import json
import resource
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

REFUSED = 3

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
# Where a training script puts weights, the best first: averages before what they average.
_TABLES = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "module", "model_state_dict")
_SPARE = 2**28  # bytes beyond what the tensors take


def main(source: Path, target: Path, memory: int, places: list[str]) -> None:
    """Read `source`, write `target`, print which table was taken and what was left out."""
    is_cut = cut_network()
    sys.path += places
    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    forbid_sockets()
    limit(memory, source.stat().st_size)
    found, taken, beside = choose(read(source))
    tensors = {
        str(name).removeprefix("module."): value for name, value in found.items() if isinstance(value, torch.Tensor)
    }
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > 4 * source.stat().st_size + 2**20:
        refuse(f"its tensors would fill {size:,} bytes")
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, target)
    others = [str(name) for name, value in found.items() if not isinstance(value, torch.Tensor)]
    report = {"cut": is_cut, "taken": taken, "beside": beside[:4], "others": others[:4]}
    sys.stdout.write(json.dumps(report))


def cut_network() -> bool:
    """Move into a network namespace without interfaces, if the kernel supports and allows it."""
    kernel = ctypes.CDLL(None)
    return hasattr(kernel, "unshare") and (
        kernel.unshare(_NEW_NETWORK) == 0 or kernel.unshare(_NEW_USER | _NEW_NETWORK) == 0
    )


def forbid_sockets() -> None:
    """Make Python's sockets unusable. (Called after torch is imported, because its imports subclass them.)"""

    def no_socket(*_: Any, **__: Any) -> NoReturn:
        raise OSError("no network here")

    vars(socket)["socket"] = no_socket


def limit(memory: int, size: int) -> None:
    """Forbid further processes, and limit memory to what is available and to what a file of this size can need: it is
    read, its tensors are copied and written, and they are at most four times as large as the file."""
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        used = 0
    most = used + min(memory, 16 * size + _SPARE)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def read(source: Path) -> Any:
    """The content of the pickle, if it is only data."""
    import argparse
    import re

    import torch

    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler meets
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            refuse("its tensors would fill more memory than is available, or than a file of its size can need")
        wanted = re.search(r"Unsupported (?:global|class)[^.]*?([A-Za-z_][\w.]+)[^\w]* was not an allowed", str(error))
        wanted = wanted or re.search(r"GLOBAL ([\w.]+)", str(error))
        refuse(f"it asks for {wanted[1]}" if wanted else "it is no file of PyTorch's, or a truncated one")


def choose(found: Any) -> tuple[dict[Any, Any], str, list[str]]:
    """The state dict, also if it is nested; its key, and the keys of the other tables."""
    taken, beside = "", []
    for name in _TABLES:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            beside += [
                str(key) for key in found if key != name and isinstance(found[key], dict) and "optim" not in str(key)
            ]
            taken, found = name, found[name]
    if not isinstance(found, dict):
        refuse(f"it holds a {type(found).__name__}")
    return found, taken, beside


def refuse(reason: str) -> NoReturn:
    """Exit with code 3 and the reason."""
    sys.stderr.write(reason.strip().splitlines()[0][:300])
    sys.exit(REFUSED)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
