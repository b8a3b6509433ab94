"""x"""
import json
from typing import Any
import numpy as np
from vitrail.configs.base import ModelConfig
from vitrail.models.base import AnyModel


def page_config(config: ModelConfig) -> dict[str, Any]:
    """The settings that `forward.js` reads."""
    return {**config.to_document(), "grid": config.grid, "prefix": config.prefix, "tokens": config.tokens}


def pack_tensors(model: AnyModel) -> dict[str, np.ndarray]:
    """The tensors of a model as float32 arrays, by name."""
    return {
        name: np.ascontiguousarray(tensor.detach().cpu().float().numpy()) for name, tensor in model.page_tensors().items()
    }
