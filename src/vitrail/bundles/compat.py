"""Limits of other libraries: models that they cannot compute are refused before anything is written."""

from typing import Any

from vitrail.core.errors import UsageError
from vitrail.models.config import ModelConfig
from vitrail.models.families.hybrid.config import HybridConfig
from vitrail.models.families.vit.config import ViTConfig

# Settings of a ViT that no other library can change.
_PLAIN = {
    "position": "learned-1d",
    "placement": "once",
    "attention": "global",
    "attention_scale": None,
    "residual": True,
    "norm": "layer",
    "norm_order": "pre",
    "stride": None,
    "padding": (0, 0),
    "merge": (),
}


def unknown_to(library: str, got: str) -> UsageError:
    """The error for a model that a library does not have."""
    return UsageError(f"Model must be one that {library} has, got {got}.")


def refuse_strange_vit(config: ModelConfig, library: str, *, hybrids: bool) -> None:
    """Refuse variants of ViT that only vitrail has, and hybrids if the library has none."""
    if not isinstance(config, ViTConfig):
        return
    if isinstance(config, HybridConfig) and (not hybrids or config.stem != "resnet"):
        raise unknown_to(library, f"a hybrid with stem {config.stem}")
    for name, value in _PLAIN.items():
        if getattr(config, name) != value:
            raise unknown_to(library, f"{name.replace('_', ' ')} {getattr(config, name)!r}")
    if config.patch[0] != config.patch[1]:
        raise unknown_to(library, f"patches of {config.patch}")


def require_plain_vit(config: ModelConfig, library: str, **fixed: Any) -> None:
    """Refuse what a library that has only the paper's ViT cannot express; `fixed` are further fixed settings of it."""
    refuse_strange_vit(config, library, hybrids=False)
    if not isinstance(config, ViTConfig) or isinstance(config, HybridConfig):
        raise unknown_to(library, f"family {config.family}")
    require(config, library, pool="cls", registers=0, class_position=True, layer_scale=None, **fixed)
    if config.resolution[0] != config.resolution[1]:
        raise UsageError(f"Resolution must be square for {library}, got {config.resolution}.")


def require_head(config: ModelConfig, library: str) -> None:
    """Refuse a model without a head."""
    if not config.classes:
        raise UsageError(f"Model must have a head for {library}, got one without. Fine-tune it first.")


def require(config: ModelConfig, library: str, **fixed: Any) -> None:
    """Refuse a model whose settings differ from the fixed ones of a library."""
    for name, value in fixed.items():
        if getattr(config, name) != value:
            spoken = name.replace("_", " ")
            raise UsageError(f"Model must have {spoken} {value!r} for {library}, got {getattr(config, name)!r}.")


def other_epsilon(config: ModelConfig, library: str) -> list[str]:
    """A note if a library's fixed epsilon differs from that of this model."""
    epsilon = getattr(config, "norm_epsilon", 1e-6)
    return [f"{library} computes with epsilon 1e-06, this model with {epsilon:g}"] if epsilon != 1e-6 else []
