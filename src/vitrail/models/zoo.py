"""Every model by its name, collected from the `sizes.py` of the families. Nothing here needs torch."""

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
    """Return the names of all models, or of those that match a pattern with `*` and `?`, in upper or lower case. A
    family of another package has one name, its own.

        >>> vitrail.list_models("ViT-B/*")
        ['ViT-B/8', 'ViT-B/14', 'ViT-B/16', 'ViT-B/32']
    """
    if not isinstance(pattern, str):
        raise UsageError(f"Pattern must be a text such as 'ViT*', got {pattern!r}.")
    return [name for name in (*MODELS, *FAMILIES.extension_names) if fnmatch.fnmatchcase(name.lower(), pattern.lower())]


def find(name: str) -> ModelConfig:
    """Return the configuration of a model name, ours or timm's.

    A timm name may have a tag of weights ("vit_base_patch16_224.mae"); the weights are not loaded. A family of another
    package has a model of its own name, with its defaults, and sizes whose names begin with that name and a hyphen.
    """
    if name in MODELS:
        return MODELS[name]
    if alias := _alias(name):
        return MODELS[alias.name].replace(resolution=alias.resolution)
    if (config := _of_added_family(str(name))) is not None:
        return config
    raise UsageError(f"Model must be a name that `vitrail models` lists, got {name!r}.{like_model(str(name))}")


def like_model(name: str) -> str:
    """Return `" Did you mean 'ViT-B/16'?"` for a similar name or a name from another library; empty without one."""
    aliases = {other: ours for sizes in _SIZES for other, ours in sizes.aliases.items()}
    return did_you_mean(name, list_models(), aliases)


def is_model(name: str) -> bool:
    """Whether this is a model's name, ours or timm's without a tag."""
    return name in MODELS or name in TIMM or _of_added_family(name) is not None


def _of_added_family(name: str) -> ModelConfig | None:
    """Return the model if it belongs to a family of another package. Only that family is imported."""
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


def _alias(name: str) -> Alias | None:
    return TIMM.get(str(name).partition(".")[0])


def alias_notes(name: str) -> tuple[str, ...]:
    """Return a note if `name` is timm's, for the user."""
    alias = _alias(name)
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
