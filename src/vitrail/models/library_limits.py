"""Limits of other libraries: models that they cannot compute are refused before anything is written."""

from typing import Any

from vitrail.core.errors import UsageError
from vitrail.models.config import ModelConfig


def unknown_to(library: str, got: str) -> UsageError:
    """The error for a model that a library does not have."""
    return UsageError(f"Model must be one that {library} has, got {got}.")


def require(config: ModelConfig, library: str, **fixed: Any) -> None:
    """Refuse a model whose settings differ from the fixed ones of a library."""
    for name, value in fixed.items():
        if getattr(config, name) != value:
            setting = name.replace("_", " ")
            raise UsageError(f"Model must have {setting} {value!r} for {library}, got {getattr(config, name)!r}.")


def require_head(config: ModelConfig, library: str) -> None:
    """Refuse a model without a head."""
    if not config.classes:
        raise UsageError(f"Model must have a head for {library}, got one without. Fine-tune it first.")


def other_epsilon(config: ModelConfig, library: str) -> list[str]:
    """A note if a library's fixed epsilon differs from that of this model."""
    epsilon = getattr(config, "norm_epsilon", 1e-6)
    return [f"{library} computes with epsilon 1e-06, this model with {epsilon:g}"] if epsilon != 1e-6 else []


def other_gelu(config: ModelConfig, library: str, *, exact: bool) -> list[str]:
    """A note if a library computes GELU exactly and this model its tanh form, or the other way round."""
    if getattr(config, "activation", None) != ("gelu-tanh" if exact else "gelu"):
        return []
    if exact:
        return [f"{library} computes exact GELU, this model its tanh form"]
    return [f"{library} computes GELU in its tanh form, this model the exact one"]
