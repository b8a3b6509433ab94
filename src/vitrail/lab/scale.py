"""Larger and smaller models of the same shape."""

from typing import Any

from vitrail.configs.hybrid import HybridConfig
from vitrail.configs.resnet import ResNetConfig
from vitrail.configs.vit import ViTConfig
from vitrail.errors import UsageError


def widened(config: Any, factor: float) -> dict[str, Any]:
    """The changes that make a ViT, hybrid or plain ResNet so many times as wide. Heads keep their width, if their
    number stays an integer."""
    match config:
        case ViTConfig():
            heads = config.heads * factor
            changes: dict[str, Any] = {
                "width": round(config.width * factor),
                "mlp": round(config.mlp * factor),
                "heads": int(heads) if heads == int(heads) else config.heads,
            }
            if isinstance(config, HybridConfig):
                changes["stem_layers"] = [round(channels * factor) for channels in config.stem_layers]
            return changes
        case ResNetConfig():
            return {"base": round(config.base * factor)}
    raise UsageError(f"Family to widen must be vit, hybrid or resnet, got {config.family!r}.")


def deepened(config: Any, factor: int) -> dict[str, Any]:
    """The changes that make a ViT, hybrid or plain ResNet so many times as deep."""
    if isinstance(config, ResNetConfig):
        return {"layers": [factor * units for units in config.layers]}
    return {"depth": factor * config.depth}
