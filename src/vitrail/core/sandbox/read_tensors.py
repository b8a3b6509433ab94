"""Sandbox reader: converts the tensors of a pickle (`weights_only=True`) to a safetensors file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# Keys under which training scripts store a state dict, preferred first: averaged weights before raw ones.
_STATE_DICT_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model", "teacher", "module", "model_state_dict")

Refuse = Callable[[str], NoReturn]


def prepare() -> None:
    """Import torch before the restrictions of `child.py` apply, because the import fails under them.

    Limit torch to one thread, because the child process must not start threads.
    """
    import safetensors.torch  # noqa: F401
    import torch

    torch.set_num_threads(1)


def convert(source: Path, target: Path, refuse: Refuse) -> dict[str, Any]:
    """Read the pickle `source`, write its tensors to `target`, and return which entries were taken and left out.

    The report has the key of the state dict (`taken`), the keys of other dicts next to it (`beside`), and the names of
    entries that are not tensors (`others`).
    """
    import torch
    from safetensors.torch import save_file

    state_dict, taken, beside = choose(read(source, refuse), refuse)
    entries = [
        (str(name).removeprefix("module."), value) for name, value in state_dict.items() if torch.is_tensor(value)
    ]
    tensors = dict(entries)
    if len(tensors) < len(entries):
        refuse("it has a tensor twice, with and without the prefix module.")
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > 4 * source.stat().st_size + 2**20:
        refuse(f"its tensors would fill {size:,} bytes")
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, target)
    not_tensors = [str(name) for name, value in state_dict.items() if not isinstance(value, torch.Tensor)]
    return {"taken": taken, "beside": beside[:4], "others": not_tensors[:4]}


def read(source: Path, refuse: Refuse) -> Any:
    """Return the content of a pickle that contains only data; refuse any other."""
    import argparse
    import re

    import torch

    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises various errors
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            refuse("its tensors would fill more memory than is available, or than a file of its size can need")
        name = re.search(r"Unsupported (?:global|class)[^.]*?([A-Za-z_][\w.]+)[^\w]* was not an allowed", str(error))
        name = name or re.search(r"GLOBAL ([\w.]+)", str(error))
        refuse(f"it asks for {name[1]}" if name else "it is truncated or not a PyTorch file")


def choose(content: Any, refuse: Refuse) -> tuple[dict[Any, Any], str, list[str]]:
    """Return the state dict in a checkpoint, at any depth, its key, and the keys of other dicts except optimisers."""
    taken, beside = "", []
    for name in _STATE_DICT_KEYS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            beside += [
                str(key)
                for key in content
                if key != name and isinstance(content[key], dict) and "optim" not in str(key)
            ]
            taken, content = name, content[name]
    if not isinstance(content, dict):
        refuse(f"it contains a {type(content).__name__}")
    return content, taken, beside
