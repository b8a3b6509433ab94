"""Every model by its name, collected from the `sizes.py` of the families. Nothing here needs torch."""

import fnmatch

from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.registry import load_object
from vitrail.models.config import ModelConfig
from vitrail.models.families import FAMILIES
from vitrail.models.sizes import Alias, Sizes

# Of the built-in families, in the order of the registry.
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
    """The names of all models, or of those that match a pattern with `*` and `?`, in upper or lower case: the built-in
    ones, and one for each family of another package.

        >>> vitrail.list_models("ViT-B/*")
        ['ViT-B/8', 'ViT-B/14', 'ViT-B/16', 'ViT-B/32']
    """
    if not isinstance(pattern, str):
        raise UsageError(f"Pattern must be a text such as 'ViT*', got {pattern!r}.")
    return [name for name in (*MODELS, *FAMILIES.extension_names) if fnmatch.fnmatchcase(name.lower(), pattern.lower())]


def find(name: str) -> ModelConfig:
    """The configuration of a model name, ours or timm's, which may have a tag of weights ("vit_base_patch16_224.mae"):
    these are not loaded. A family of another package has a model of its own name, with its defaults, and its sizes,
    whose names begin with that name and a hyphen."""
    if name in MODELS:
        return MODELS[name]
    if alias := _alias(name):
        return MODELS[alias.name].replace(resolution=alias.resolution)
    if (config := _of_added_family(str(name))) is not None:
        return config
    raise UsageError(f"Model must be a name that `vitrail models` lists, got {name!r}.{like_model(str(name))}")


def like_model(name: str) -> str:
    """`" Did you mean 'ViT-B/16'?"`: a model of a similar name, or one that others call so."""
    aliases = {other: ours for sizes in _SIZES for other, ours in sizes.aliases.items()}
    return did_you_mean(name, list_models(), aliases)


def is_model(name: str) -> bool:
    """Whether a model has this name, ours or timm's, without a tag."""
    return name in MODELS or name in TIMM or _of_added_family(name) is not None


def _of_added_family(name: str) -> ModelConfig | None:
    """The model of a family of another package. Only the family whose name begins the model's is imported."""
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
    """What to tell the user who called a model by timm's name."""
    alias = _alias(name)
    if alias is None:
        return ()
    ours, resolution = alias
    return (f"{name} is timm's name for {ours} at {resolution} px; timm's weights are not loaded",)


def small(size: str, family: str) -> ModelConfig:
    """The preset of a family that is called by this size: `small("Nano/8", "resnet")`, `small("Nano", "vit")`."""
    size, _, patch = size.partition("/")
    of_size = [config for config in MODELS.values() if config.family == family and f"-{size}" in config.name]
    fitting = [config for config in of_size if config.name.endswith(f"/{patch}")] if patch == "8" else of_size
    if not fitting:
        raise UsageError(f"Family must have a preset of size {size!r}, got {family!r}.")
    return fitting[0]
