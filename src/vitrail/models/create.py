"""Building a model from a name or a configuration."""

from typing import Any

from vitrail.configs import zoo
from vitrail.configs.base import ModelConfig
from vitrail.extensions import load_object
from vitrail.models.base import AnyModel


def create(name: str, /, **overrides: Any) -> AnyModel:
    """A newly initialised model by its name, with settings changed: `create("ViT-B/16", classes=10, resolution=384)`.

    `vitrail.configs` lists every setting of every family. Weights are initialised with torch's random generator: seed
    it to repeat them.
    """
    return build(zoo.find(name).replace(**overrides))


def build(config: ModelConfig) -> AnyModel:
    """A newly initialised model of this configuration."""
    return load_object(config.model)(config)
