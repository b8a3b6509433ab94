"""Recorded activations: the intermediate results of a forward pass. Recording keeps the fused kernels."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitrail.core.errors import UsageError
from vitrail.core.notebook import table
from vitrail.core.settings import as_integer
from vitrail.models.device import evaluating

if TYPE_CHECKING:
    from vitrail.models.base import AnyModel


@dataclasses.dataclass(repr=False)
class Activations:
    """Intermediate results of a forward pass, by name, in the order of computation."""

    layers: frozenset[int]
    """Indices of the recorded layers, from 0."""
    with_attention: bool = True
    """Whether the attention weights of these layers are recorded, too."""
    inside: frozenset[int] = frozenset()
    """Indices of the Transformer layers in which every step is recorded."""
    steps: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Intermediate results.

    - Every family: `blocks.0`, `blocks.1`, ... (outputs of the recorded layers) and `pooled` (input of the head).
    - Models of patches: `patches` (flattened pixels, or features of a hybrid's stem) and `projected`.
    - Transformers: `tokens`, with positions.
    - A layer of `inside`, for example 0, in the order of eqs. 2, 3 and 5 to 8 of the paper: `blocks.0.norm1`, `.q`,
      `.k`, `.v`, `.scores` (q k^T / sqrt(K), with biases), `.weights` (softmax of the scores), `.heads` (weights times
      v), `.msa` (projection of all heads), `.middle` (z', after the residual connection), `.norm2`, `.z1` (hidden layer
      of the MLP), `.activated` (its GELU) and `.z2` (output of the MLP).
    - Models that merge tokens: merged tokens are recorded as equal tokens, each in its position, and `blocks.0.merged`
      is the input of layer 0."""
    attention: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """Attention weights (images, heads, queries, keys) of each recorded layer; rows sum to 1."""
    pooling: Tensor | None = None
    """Attention weights of attention pooling (images, heads, 1, keys), if the model has it."""
    logits: Tensor = dataclasses.field(default_factory=functools.partial(torch.empty, 0))
    """Output of the model, bit-identical to the output without recording."""

    def __repr__(self) -> str:
        rows = [("step", "shape"), *self._shapes()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {shape}" for name, shape in rows)

    def _repr_html_(self) -> str:
        return table(("step", "shape"), self._shapes())

    def _shapes(self) -> list[tuple[str, str]]:
        """The name and the shape of every tensor, as on the page of `inspect`."""
        tensors = {f'steps["{name}"]': step for name, step in self.steps.items()}
        tensors |= {f"attention[{layer}]": weights for layer, weights in self.attention.items()}
        if self.pooling is not None:
            tensors["pooling"] = self.pooling
        return [
            (name, " x ".join(map(str, tensor.shape))) for name, tensor in (tensors | {"logits": self.logits}).items()
        ]

    def records_attention(self, layer: int) -> bool:
        """Return whether a layer's attention weights are recorded: their memory grows with the number of tokens
        squared."""
        return self.with_attention and layer in self.layers

    def record_steps(self, layer: int, steps: dict[str, Tensor]) -> None:
        """Record the steps inside a layer under the names `blocks.LAYER.NAME`."""
        self.steps |= {f"blocks.{layer}.{name}": step for name, step in steps.items()}

    def record_output(self, layer: int, output: Tensor) -> None:
        """Record the output of a layer, if that layer is recorded."""
        if layer in self.layers:
            self.steps[f"blocks.{layer}"] = output


def look(
    model: "AnyModel",
    images: Tensor,
    layers: Iterable[int] | None = None,
    *,
    attention: bool = True,
    inside: Iterable[int] | None = (),
    gradients: bool = False,
) -> Activations:
    """Run `model` on a batch of preprocessed `images` and return its intermediate results.

    `layers` are the blocks to record, from 0 (negative: from the last); default all. Their attention weights are
    computed separately from the fused kernel: the logits are bit-identical, and memory grows only with the recorded
    layers. `attention=False` omits the weights. `inside` are layers of a Transformer in which every step is recorded,
    from LayerNorm to the MLP (see `Activations.steps`); None means all. The model runs in evaluation mode, and its mode
    is restored. With `gradients=True`, the results can be differentiated.

        >>> model = vitrail.create("ViT-Nano/7")
        >>> activations = vitrail.look(model, torch.zeros(1, 1, 28, 28), layers=[0, -1])
        >>> list(activations.steps)
        ['patches', 'projected', 'tokens', 'blocks.0', 'blocks.3', 'pooled']
        >>> activations.attention[3].shape
        torch.Size([1, 4, 17, 17])
        >>> vitrail.look(model, torch.zeros(1, 1, 28, 28), inside=[0]).steps["blocks.0.q"].shape
        torch.Size([1, 4, 17, 16])
    """
    with torch.set_grad_enabled(gradients), evaluating(model):
        return model.record(images, layers, attention=attention, inside=inside)


def resolve_index(noun: str, number: int, count: int) -> int:
    """Return the index from 0 of a layer (or head) among `count`; -1 is the last. `noun` is its name in errors."""
    index = as_integer(number)
    if index is None:
        raise UsageError(f"{noun} must be an integer, got {number!r}.")
    if not -count <= index < count:
        raise UsageError(f"{noun} must be from 0 to {count - 1} (or -1 to {-count} from the end), got {index}.")
    return index % count


def resolve_indices(noun: str, numbers: Iterable[int], count: int) -> list[int]:
    """Return the indices from 0 of several layers (or heads) among `count`, by `resolve_index`."""
    if not isinstance(numbers, Iterable):
        raise UsageError(f"{noun}s must be a list of integers, got {numbers!r}.")
    return [resolve_index(noun, number, count) for number in numbers]
