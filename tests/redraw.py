"""Parameters that make tests mean something."""

import torch
from torch import nn


@torch.no_grad()
def redraw(model: nn.Module, std: float = 0.2) -> nn.Module:
    """All parameters from N(0, std^2), scales of norms around 1: at initialisation heads and relative tables are zero,
    and statements about logits are empty."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * std)
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1)
    return model.eval()
