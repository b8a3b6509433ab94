"""Limits of other libraries: reject models that a library cannot compute before anything is converted."""

from typing import Any

from vitrail.core.errors import UsageError
from vitrail.models.config import ModelConfig


def unsupported_model_error(library: str, variant: str) -> UsageError:
    """Return the error for a variant of a model that `library` does not have."""
    return UsageError(f"Model must be one that {library} has, got {variant}.")


def require_settings(config: ModelConfig, library: str, **fixed: Any) -> None:
    """Raise `UsageError` for a model whose settings differ from the fixed settings of a library."""
    for name, value in fixed.items():
        if getattr(config, name) != value:
            setting = name.replace("_", " ")
            raise UsageError(f"Model must have {setting} {value!r} for {library}, got {getattr(config, name)!r}.")


def require_head(config: ModelConfig, library: str) -> None:
    """Raise `UsageError` for a model without a head."""
    if not config.classes:
        raise UsageError(f"Model must have a head for {library}, got a model without a head. Fine-tune it first.")


def epsilon_notes(config: ModelConfig, library: str) -> list[str]:
    """Return a note if the epsilon of the norms differs from the fixed epsilon of a library; otherwise an empty
    list."""
    epsilon = getattr(config, "norm_epsilon", 1e-6)
    return [f"{library} computes with epsilon 1e-06, this model with {epsilon:g}"] if epsilon != 1e-6 else []


def gelu_notes(config: ModelConfig, library: str, *, exact: bool) -> list[str]:
    """Return a note if the library computes another form of GELU (exact or tanh) than the model; otherwise an empty
    list."""
    if getattr(config, "activation", None) != ("gelu-tanh" if exact else "gelu"):
        return []
    if exact:
        return [f"{library} computes exact GELU, this model its tanh form"]
    return [f"{library} computes GELU in its tanh form, this model the exact one"]
