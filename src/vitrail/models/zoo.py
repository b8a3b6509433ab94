"""All named models, collected from the `sizes.py` of the families. This module does not import torch."""

import fnmatch

from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.registry import load_object
from vitrail.models.config import ModelConfig
from vitrail.models.families import FAMILIES
from vitrail.models.sizes import Alias, Sizes

# Built-in families, in the order of the registry.
_SIZES: list[Sizes] = [
    load_object(FAMILIES[family].sizes) for family in FAMILIES if family not in FAMILIES.extension_names
]

MODELS: dict[str, ModelConfig] = {
    config.name: config
    for group in ("published", "small", "faces")
    for sizes in _SIZES
    for config in getattr(sizes, group)
}
TIMM: dict[str, Alias] = {name: alias for sizes in _SIZES for name, alias in sizes.timm.items()}


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of all models, or the names that match a pattern with `*` and `?`, in upper or lower case. A
    family of another package is listed by its own name.

        >>> vitrail.list_models("ViT-B/*")
        ['ViT-B/8', 'ViT-B/14', 'ViT-B/16', 'ViT-B/32']
    """
    if not isinstance(pattern, str):
        raise UsageError(f"Pattern must be a text such as 'ViT*', got {pattern!r}.")
    return [name for name in (*MODELS, *FAMILIES.extension_names) if fnmatch.fnmatchcase(name.lower(), pattern.lower())]


def find(name: str) -> ModelConfig:
    """Return the configuration of a model name, ours or timm's.

    A timm name may have a tag of weights ("vit_base_patch16_224.mae"); the weights are not loaded. A family of another
    package has a model with the family's name and default settings, and sizes named FAMILY-SIZE.
    """
    if name in MODELS:
        return MODELS[name]
    if alias := _timm_alias(name):
        return MODELS[alias.name].replace(resolution=alias.resolution)
    if (config := _find_extension_model(str(name))) is not None:
        return config
    raise UsageError(f"Model must be a name that `vitrail models` lists, got {name!r}.{suggest_model(str(name))}")


def suggest_model(name: str) -> str:
    """Return the end of an error, such as `" Did you mean 'ViT-B/16'?"`, if `name` is similar to a model's name or is
    a name from another library; otherwise an empty text."""
    aliases = {theirs: ours for sizes in _SIZES for theirs, ours in sizes.aliases.items()}
    return did_you_mean(name, list_models(), aliases)


def is_model(name: str) -> bool:
    """Return whether `name` is the name of a model, ours or timm's without a tag."""
    return name in MODELS or name in TIMM or _find_extension_model(name) is not None


def _find_extension_model(name: str) -> ModelConfig | None:
    """Return the configuration of a model of a family of another package; None if no such family has this name.
    Only that family is imported."""
    family = next(
        (family for family in FAMILIES.extension_names if name == family or name.startswith(f"{family}-")), None
    )
    if family is None:
        return None
    config = FAMILIES[family]
    if name == family:
        return config(name=family)
    sizes: Sizes = load_object(config.sizes) if config.sizes else Sizes()
    return next((size for size in sizes.models if size.name == name), None)


def _timm_alias(name: str) -> Alias | None:
    return TIMM.get(str(name).partition(".")[0])


def alias_notes(name: str) -> tuple[str, ...]:
    """Return a note for the user if `name` is timm's; otherwise an empty tuple."""
    alias = _timm_alias(name)
    if alias is None:
        return ()
    ours, resolution = alias
    return (f"{name} is timm's name for {ours} at {resolution} px; timm's weights are not loaded",)


def small(size: str, family: str) -> ModelConfig:
    """Return a family's preset of a size such as "Nano", or "Nano/8" for images of 32 px."""
    size, _, patch = size.partition("/")
    presets = [config for config in MODELS.values() if config.family == family and f"-{size}" in config.name]
    if patch == "8":
        presets = [config for config in presets if config.name.endswith("/8")]
    if not presets:
        raise UsageError(f"Family must have a preset of size {size!r}, got {family!r}.")
    return presets[0]
