"""Building a model from a configuration."""

import torch

from vitrail.core.memory import check_allocation
from vitrail.core.registry import load_object
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig


def build(config: ModelConfig) -> AnyModel:
    """Create an initialised model of this configuration. Raise an error if its weights do not fit into memory."""
    if torch.get_default_device().type != "meta":
        check_allocation(4 * config.parameters, f"Model {config.name or config.family}")
    return load_object(config.model)(config)
