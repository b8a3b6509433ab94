"""Weight initialisation as in the code of the papers."""

import math

from torch import nn

from vitrail.models.layers import MLP


def lecun_normal_(layer: nn.Linear | nn.Conv2d) -> None:
    """Initialise as flax does by default: a normal of variance 1 / fan-in, truncated at two standard deviations, and a
    zero bias."""
    fan_in = layer.weight[0].numel()
    std = math.sqrt(1 / fan_in) / 0.87962566103423978  # truncation narrows the normal by this factor
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def initialise_attention_(linear: nn.Linear, parts: int) -> None:
    """Initialise `parts` stacked matrices (queries, keys and values) separately, as flax does: Xavier-uniform, and a
    zero bias."""
    for part in linear.weight.chunk(parts):
        nn.init.xavier_uniform_(part)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def initialise_mlp_(mlp: MLP) -> None:
    """Initialise as the ViT paper's code does: Xavier-uniform, and biases near zero."""
    for linear in (mlp.fc1, mlp.fc2):
        nn.init.xavier_uniform_(linear.weight)
        nn.init.normal_(linear.bias, std=1e-6)
