"""Roles of parameters, which decide how an optimiser updates them."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor


class Role(NamedTuple):
    """The properties of a parameter that an optimiser uses."""

    decays: bool
    """Whether weight decay applies: yes for matrices and kernels, no for biases, norms, scales, tokens and
    positions."""
    is_matrix: bool
    """Whether the parameter is a matrix of a block, which Muon updates."""
    layer: int
    """Position for layer-wise learning rates: 0 for the embedding, l for block l - 1, depth + 1 for modules after the
    last block."""
    parts: int
    """Number of matrices stacked in the parameter: 3 for queries, keys and values."""


def decays(name: str, parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter of this name."""
    return parameter.ndim >= 2 and name.rpartition(".")[2].startswith("weight")


def has_ordered_blocks(names: Iterable[str]) -> bool:
    """Return whether layer-wise learning rates apply, because the parameters belong to one sequence of blocks. `names`
    are parameter names of a model, or of an objective that has the model as `model`."""
    names = [name.removeprefix("model.") for name in names]
    return any(name.startswith("blocks.0.") for name in names) and not any("stages." in name for name in names)
