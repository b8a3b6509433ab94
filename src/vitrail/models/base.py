"""What every model of every family is: images in, logits out, and a way to watch."""

import dataclasses
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.configs.base import ModelConfig
from vitrail.errors import UsageError
from vitrail.settings import Pair


@dataclasses.dataclass
class Seen:
    """What was seen of a model at work, by name, in the order in which it was computed."""

    layers: frozenset[int]
    """The layers that were asked for, from 0."""
    weighs: bool = True
    """Whether the attention weights of these layers are wanted, too."""
    steps: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Intermediate results. Every family: `blocks.0` and so on, what left each layer asked for, and `pooled`, what the
    head read. Models of patches: `patches` (flattened pixels, or features of a hybrid's stem) and `projected`.
    Transformers: `tokens`, with positions."""
    attention: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """Attention weights (images, heads, queries, keys) of each layer asked for; rows sum to 1."""
    pooling: Tensor | None = None
    """Where the query of attention pooling looks (images, heads, 1, keys), in a model that has one."""
    logits: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """What the model answered, bit for bit what it answers unobserved."""

    def wants_attention(self, layer: int) -> bool:
        """Whether a layer's attention weights are to be computed: they take memory that grows with tokens squared."""
        return self.weighs and layer in self.layers

    def keep(self, layer: int, output: Tensor) -> None:
        """Write down what left a layer, if that layer was asked for."""
        if layer in self.layers:
            self.steps[f"blocks.{layer}"] = output

    def finish(self, pooled: Tensor, logits: Tensor) -> None:
        """Write down what the head read and said."""
        self.steps["pooled"] = pooled
        self.logits = logits


Config = TypeVar("Config", bound=ModelConfig)


class Model(nn.Module, Generic[Config]):
    """The surface that all families share; `Model[ViTConfig]` is one of a family."""

    config: Config
    head: nn.Linear
    places_own_weights = False
    """Whether weights belong to places of the picture, so that another size is another model."""
    recomputes = False
    """Whether training computes each block again in the backward pass instead of remembering what was in it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, images_BCHW: Tensor, seen: Seen | None = None) -> Tensor:
        """Logits (B, K). `seen` collects what passes by; it never changes the way."""
        raise NotImplementedError

    def draw(self) -> None:
        """Initialise the parameters, unless they are empty shapes: drawing those would import a second of torch."""
        if next(self.parameters()).device.type != "meta":
            self.initialise()

    def initialise(self) -> None:
        """Draw the parameters as the family's paper or code does."""
        raise NotImplementedError

    def fill_tables(self) -> None:
        """Compute what follows from the configuration alone; a model without such tables has nothing to do."""

    def through(self, block: nn.Module, *arguments: Any) -> Any:
        """Call one block of many."""
        if self.recomputes and self.training:
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)

    def _classify(self, pooled: Tensor, seen: Seen | None) -> Tensor:
        """What the head says of what it reads."""
        logits = self.head(pooled)
        if seen is not None:
            seen.finish(pooled, logits)
        return logits

    def set_table(self, name: str, table: Tensor | None) -> None:
        """Hold a fixed table with the weights' device and type, outside of the state dict. (None is a plain attribute:
        torch.export counts empty buffers wrongly.)"""
        if table is None:
            setattr(self, name, None)
            return
        weight = next(self.parameters())
        table = table.to(weight.device, weight.dtype if table.is_floating_point() else table.dtype)
        self.register_buffer(name, table, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """After a move to another device or type, tables are computed anew, so that they are never rounded twice."""
        super()._apply(fn, recurse)
        self.fill_tables()
        return self

    def resize(self, resolution: int | Pair) -> Self:
        """A copy of this model for another resolution, on the same device; refused where places have own weights."""
        config = self.config.replace(resolution=resolution)
        if self.places_own_weights and config.resolution != self.config.resolution:
            raise UsageError(
                f"Resize must keep the resolution of family {config.family}, whose weights belong to places, got"
                f" {config.resolution} after {self.config.resolution}. Create a new model instead."
            )
        return self._rebuild(config, {name: tensor.clone() for name, tensor in self.state_dict().items()})

    def _rebuild(self, config: Config, tensors: dict[str, Tensor]) -> Self:
        """A model of `config` with these tensors, frozen where this one is frozen, and in its mode."""
        with torch.device("meta"):
            rebuilt = type(self)(config)
        rebuilt.load_state_dict(tensors, assign=True)
        rebuilt.fill_tables()
        for ours, theirs in zip(self.parameters(), rebuilt.parameters(), strict=True):
            theirs.requires_grad_(ours.requires_grad)
        return rebuilt.train(self.training)

    def _check_images(self, images_BCHW: Tensor) -> None:
        expected = (self.config.channels, *self.config.resolution)
        if not isinstance(images_BCHW, Tensor) or not images_BCHW.is_floating_point():
            kind = images_BCHW.dtype if isinstance(images_BCHW, Tensor) else type(images_BCHW).__name__
            raise UsageError(f"Images must be a tensor of floating-point numbers, got {kind}. Preprocess them.")
        if images_BCHW.ndim != 4 or tuple(images_BCHW.shape[1:]) != expected:
            raise UsageError(
                f"Images must have shape (batch, {', '.join(map(str, expected))}), got {tuple(images_BCHW.shape)}."
                " Preprocess them, or resize() the model."
            )


AnyModel = Model[Any]
