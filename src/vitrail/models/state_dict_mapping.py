"""State-dict mappings: which tensors of another library correspond to which tensors of Vitrail.

The `weights.py` of a family has a mapping for each library that has models of the family. A mapping lists entries for a
configuration. An entry joins tensors of the library to one tensor of ours, and splits our tensor into theirs.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from vitrail.core.registry import load_object
from vitrail.models.config import ModelConfig
from vitrail.models.create import build

Config = TypeVar("Config", bound=ModelConfig)


class Entry(NamedTuple):
    """One of our tensors, and the tensors of another library that it is joined from."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateDictMapping(Generic[Config]):
    """The tensors and settings of one family in one library, and the variants that the library supports."""

    entries: Callable[[Config, Collection[str] | None], Iterable[Entry]]
    """Returns the entries of a model. The second argument has the tensor names of the file that is read, for libraries
    with several naming schemes; None means the scheme for writing."""
    check: Callable[[Config], None] = lambda config: None
    """Raises `UsageError` for a model that the library cannot compute."""
    settings: Callable[[Config], dict[str, Any]] = lambda config: {}
    """Returns the settings under the library's names, in JSON types."""
    function: Callable[[Config], str | None] = lambda config: None
    """The library's function that builds any model of the family from `settings`; None if the library builds only
    published models, by name."""
    why_unverified: Callable[[Config], str | None] = lambda config: None
    """Returns the reason why the library cannot open the model to compare outputs; None if it can."""


def mapping_of(config: ModelConfig, weight_format: str) -> StateDictMapping[Any] | None:
    """Return the mapping of a model's family for a weight format; None if the library does not have the family."""
    return load_object(config.weights).get(weight_format) if config.weights else None


def parameter_names(config: ModelConfig) -> list[str]:
    """Return the names of all tensors of a model."""
    with torch.device("meta"):
        return list(build(config).state_dict())


def renamed_entry(ours: str, theirs: str) -> Entry:
    """Return the entry for a tensor that only has another name in the library."""
    return Entry(ours, (theirs,), lambda parts: parts[0], lambda tensor: [tensor])


def reshaped_entry(
    ours: str, theirs: str, inward: Callable[[Tensor], Tensor], outward: Callable[[Tensor], Tensor]
) -> Entry:
    """Return the entry for a tensor with another shape or order of dimensions. `inward` converts the library's tensor
    to ours, `outward` converts ours back."""
    return Entry(ours, (theirs,), lambda parts: inward(parts[0]), lambda tensor: [outward(tensor)])


def stacked_entry(ours: str, theirs: Iterable[str]) -> Entry:
    """Return the entry for tensors that we stack along the first dimension, such as queries, keys and values."""
    theirs = tuple(theirs)
    return Entry(ours, theirs, lambda parts: torch.cat(list(parts)), lambda tensor: tensor.chunk(len(theirs)))


# JAX and TensorFlow store kernels with the input first.


def jax_matrix_entry(ours: str, theirs: str) -> Entry:
    """Return the entry for the kernel of a linear layer."""
    return reshaped_entry(ours, theirs, lambda kernel: kernel.T, lambda matrix: matrix.T)


def jax_kernel_entry(ours: str, theirs: str) -> Entry:
    """Return the entry for the kernel of a convolution."""
    return reshaped_entry(ours, theirs, lambda hwio: hwio.permute(3, 2, 0, 1), lambda oihw: oihw.permute(2, 3, 1, 0))


def jax_vector_entry(ours: str, theirs: str) -> Entry:
    """Return the entry for a bias or scale. In older files, the scales and biases of norms have three leading
    dimensions of size 1."""
    return reshaped_entry(ours, theirs, lambda tensor: tensor.flatten(), lambda tensor: tensor)


def jax_layer_entry(ours: str, theirs: str) -> Entry:
    """Return the entry for a linear layer's weight or bias, or a norm's scale or bias."""
    name, _, leaf = ours.rpartition(".")
    is_norm = "norm" in name.rpartition(".")[2]
    if leaf == "bias":
        return jax_vector_entry(ours, f"{theirs}/bias")
    return jax_vector_entry(ours, f"{theirs}/scale") if is_norm else jax_matrix_entry(ours, f"{theirs}/kernel")
