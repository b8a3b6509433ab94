"""The types in a family's `sizes.py`: named models, and timm's names for them."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from vitrail.models.config import ModelConfig


class Alias(NamedTuple):
    """The model that a name of another library refers to."""

    name: str
    """The model's name in `vitrail models`."""
    resolution: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The named models of a family, in the order in which `vitrail models` lists them."""

    published: tuple[ModelConfig, ...] = ()
    """Sizes and names from papers."""
    small: tuple[ModelConfig, ...] = ()
    """Presets for images of 8 to 32 pixels that train in minutes on two cores.

    All presets of one size have the same number of multiply-accumulates within a few per cent, so that families can be
    compared at equal cost: 1.4 M for Pico (8 px), 2.4 M for Nano (28 px), 2.6 M for Nano/8 (32 px in colour), 11.8 M
    for Micro (28 px).
    """
    faces: tuple[ModelConfig, ...] = ()
    """Models that return the embedding of a face."""
    timm: Mapping[str, Alias] = dataclasses.field(default_factory=dict)
    """timm's names for models with the same tensors. A test compares them with timm."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names from other libraries, each with the name of our model that errors suggest."""

    @property
    def models(self) -> tuple[ModelConfig, ...]:
        """All models, in the order of `vitrail models`."""
        return self.published + self.small + self.faces
