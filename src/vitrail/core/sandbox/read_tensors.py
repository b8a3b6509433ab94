"""Sandbox reader: converts the tensors of a pickle (`weights_only=True`) to a safetensors file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Where a training script puts weights, the best first: averages before what they average.
_TABLES = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "module", "model_state_dict")

Refuse = Callable[[str], NoReturn]


def prepare() -> None:
    """Import torch."""
    import safetensors.torch  # noqa: F401
    import torch

    torch.set_num_threads(1)


def convert(source: Path, target: Path, refuse: Refuse) -> dict[str, Any]:
    """Read `source`, write `target`; returns which table was taken and what was left out."""
    import torch
    from safetensors.torch import save_file

    found, taken, beside = choose(read(source, refuse), refuse)
    named = [(str(name).removeprefix("module."), value) for name, value in found.items() if torch.is_tensor(value)]
    tensors = dict(named)
    if len(tensors) < len(named):
        refuse("it has a tensor twice, with and without the prefix module.")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > 4 * source.stat().st_size + 2**20:
        refuse(f"its tensors would fill {size:,} bytes")
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, target)
    others = [str(name) for name, value in found.items() if not isinstance(value, torch.Tensor)]
    return {"taken": taken, "beside": beside[:4], "others": others[:4]}


def read(source: Path, refuse: Refuse) -> Any:
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


def choose(found: Any, refuse: Refuse) -> tuple[dict[Any, Any], str, list[str]]:
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
