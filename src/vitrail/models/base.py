"""What every model of every family is: images in, logits out, and a way to watch."""

import dataclasses
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vitrail.configs.base import ModelConfig
from vitrail.errors import UsageError


@dataclasses.dataclass
class Seen:
    """What was seen of a model at work, by name, in the order in which it was computed."""

    layers: frozenset[int]
    """The layers that were asked for, from 0."""
    steps: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Intermediate results. For ViT: `patches` (flattened pixels), `projected`, `tokens` (eq. 1), `blocks.0` and so on
    (eqs. 2-3), `pooled` (eq. 4)."""
    attention: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """Attention weights (images, heads, queries, keys) of each layer asked for; rows sum to 1."""
    logits: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    """What the model answered, bit for bit what it answers unobserved."""


Config = TypeVar("Config", bound=ModelConfig)


class Model(nn.Module, Generic[Config]):
    """The surface that all families share; `Model[ViTConfig]` is one of a family."""

    config: Config

    def forward(self, images_BCHW: Tensor, seen: Seen | None = None) -> Tensor:
        """Logits (B, K). `seen` collects what passes by; it never changes the way."""
        raise NotImplementedError

    def fill_tables(self) -> None:
        """Compute what follows from the configuration alone; a model without such tables has nothing to do."""

    def _check_images(self, images_BCHW: Tensor) -> None:
        expected = (self.config.channels, *self.config.resolution)
        if images_BCHW.ndim != 4 or tuple(images_BCHW.shape[1:]) != expected:
            raise UsageError(
                f"Images must have shape (batch, {', '.join(map(str, expected))}), got {tuple(images_BCHW.shape)}."
                " Preprocess them, or resize() the model."
            )


AnyModel = Model[Any]
