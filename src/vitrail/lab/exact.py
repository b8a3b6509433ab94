"""Exact statements about architectures, checked without training on models with random weights in double precision.

Each statement is checked together with a counterexample for which it does not hold.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.models.create import build

EQUAL = 1e-9
"""Relative difference below which two outputs count as equal."""
DIFFERENT = 1e-2
"""Relative difference above which two outputs count as different. Between the two, no statement is made."""

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def redraw(model: Module, std: float = 0.2) -> Module:
    """Draw all parameters of a module from N(0, std^2), in place, with scales of norms around 1. Return the module.

    At initialisation, heads and relative position tables are zero, so that any statement about logits would hold.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1)
    return model.eval()


def random_model(config: ModelConfig) -> AnyModel:
    """Return a model with random weights in double precision."""
    return redraw(build(config).double(), std=0.3)


def random_images(model: AnyModel, count: int = 3, seed: int = 0) -> Tensor:
    """Return noise images (count, C, H, W) in double precision."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, model.config.channels, *model.config.resolution)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def relative_difference(outputs: Tensor, other_outputs: Tensor) -> float:
    """Return the largest difference of two outputs (B, ...) relative to the spread of the outputs over images."""
    return float((outputs - other_outputs).abs().max() / (outputs - outputs.mean(0)).abs().max())
