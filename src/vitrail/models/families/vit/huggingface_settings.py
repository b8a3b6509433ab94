"""Settings of the Vision Transformer under the names of transformers."""

from typing import Any

from vitrail.models.families.vit.config import ViTConfig

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu-tanh": "gelu_pytorch_tanh",
    "quick-gelu": "quick_gelu",
    "relu": "relu",
}


def shape_settings(config: ViTConfig) -> dict[str, Any]:
    """Settings of a config.json that ViT, DeiT, DINOv2 and CLIP share."""
    return {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": _ACTIVATIONS[config.activation],
        "layer_norm_eps": config.norm_epsilon,
        "image_size": config.resolution[0],
        "patch_size": config.patch[0],
        "num_channels": config.channels,
    }
