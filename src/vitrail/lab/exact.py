"""What is proved without training: models with random weights in double precision, where equal means equal.

Every statement stands beside a contrast that is not so.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.models.create import build

EQUAL = 1e-9
"""Below this, two answers are the same."""
DIFFERENT = 1e-2
"""Above this, they are not; between the two, nothing is claimed."""

Module = TypeVar("Module", bound=nn.Module)


@torch.no_grad()
def redraw(model: Module, std: float = 0.2) -> Module:
    """All parameters from N(0, std^2), scales of norms around 1: at initialisation heads and relative tables are zero,
    and statements about logits are empty."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1)
    return model.eval()


def random_model(config: ModelConfig) -> AnyModel:
    """A model with random weights in double precision."""
    return redraw(build(config).double(), std=0.3)


def random_images(model: AnyModel, count: int = 3, seed: int = 0) -> Tensor:
    """Images of noise (count, C, H, W) in double precision."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, model.config.channels, *model.config.resolution)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def relative_difference(outputs: Tensor, other_outputs: Tensor) -> float:
    """The largest difference of two outputs (B, ...), as a share of how much those of different images differ."""
    return float((outputs - other_outputs).abs().max() / (outputs - outputs.mean(0)).abs().max())
