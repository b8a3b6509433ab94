"""The device of a model, the memory format of its kernels, and evaluation mode."""

import contextlib
import functools
from collections.abc import Generator

import torch
from torch import nn

from vitrail.core.errors import UsageError
from vitrail.core.terminal import say


def find_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the accelerator of this machine (CUDA, XPU, MPS, ...), or the CPU.
    Raise `UsageError` for a device that this machine does not have."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        torch.zeros(1, device=name).tolist()
        return torch.device(name)
    except Exception:  # each missing device raises another error
        available = ["cpu"]
        if torch.accelerator.is_available():
            available.append(str(torch.accelerator.current_accelerator()))
        advice = " NVIDIA and AMD GPUs are called cuda." if name.lower().startswith("gpu") else ""
        raise UsageError(
            f"Device must be one that this machine has ({', '.join(available)}), got {name!r}.{advice}"
        ) from None


def choose_device(name: str) -> torch.device:
    """Return `find_device(name)`, and print a note on stderr unless it is the CPU."""
    device = find_device(name)
    if device.type != "cpu":
        _say_device(str(device))
    return device


@functools.cache
def _say_device(device: str) -> None:
    """Print the note about the device, once per process."""
    say(f"note: {describe_use(device)}")


def describe_use(device: object) -> str:
    """Return the text of the note about a device that is not the CPU."""
    return f"computing on device {device}; --device cpu computes on the CPU"


@torch.no_grad()
def use_channels_last(model: nn.Module) -> None:
    """Store the kernels of convolutions with the channels last, in place: about 1.5x faster for small kernels on CPU.
    Values stay the same."""
    for parameter in model.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Context manager that sets the model to evaluation mode. On exit, every module returns to its previous mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
