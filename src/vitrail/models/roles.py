"""Roles of parameters: what an optimiser needs to know about them."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Role(NamedTuple):
    """What an optimiser needs to know about a parameter."""

    decays: bool
    """Whether weight decay applies: yes for matrices and kernels, no for biases, norms, scales, tokens and
    positions."""
    is_matrix: bool
    """Whether it is a matrix of a block, which Muon updates."""
    layer: int
    """0 for the embedding, l for block l - 1, depth + 1 for what follows the last block."""
    parts: int
    """Number of matrices stacked in it: 3 for queries, keys and values."""


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter of this name."""
    return parameter.ndim >= 2 and name.rpartition(".")[2].startswith("weight")


def has_ordered_blocks(names: Iterable[str]) -> bool:
    """Whether the parameters of these names, of a model or of an objective that wraps it as `model`, are those of one
    sequence of blocks, so that layer-wise learning rates apply."""
    names = [name.removeprefix("model.") for name in names]
    return any(name.startswith("blocks.0.") for name in names) and not any("stages." in name for name in names)
