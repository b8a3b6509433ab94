"""From a name or a configuration to a model."""

from typing import Any

from vitrail.configs import zoo
from vitrail.configs.base import ModelConfig
from vitrail.configs.vit import ViTConfig
from vitrail.models.base import AnyModel
from vitrail.models.vit import ViT


def create(name: str, **overrides: Any) -> AnyModel:
    """A freshly initialised model by its name, with settings changed: `create("ViT-B/16", classes=10, resolution=384)`.

    `vitrail.configs` lists every setting of every family. Randomness is torch's: seed it for the same weights.
    """
    return build(zoo.find(name).replace(**overrides))


def build(config: ModelConfig) -> AnyModel:
    """A freshly initialised model of this configuration."""
    match config:
        case ViTConfig():
            return ViT(config)
    raise TypeError(f"no model for {type(config).__name__}")
