"""What there is: models, their sizes and costs, recipes."""

from typing import Annotated, Any

from vitrail.api.flags import as_pair, command, resolution_flag
from vitrail.api.results import Report, Rows
from vitrail.bundles.folder import find_config
from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.flags import argument, flag
from vitrail.models import zoo
from vitrail.models.config import INFO_KEYS, model_settings
from vitrail.training.recipe import find_recipe, purpose, recipe_names, recipe_text


@command
def models(
    pattern: Annotated[str, argument("Only names like this one: 'ViT*', '*/16', ViT-B.", metavar="[PATTERN]")] = "*",
) -> Rows:
    """List all models, or those that match a pattern, with their parameters, multiply-accumulates and shapes."""
    names = zoo.list_models(pattern) or zoo.list_models(f"{pattern}*" if pattern else "")
    if not names:
        near = did_you_mean(pattern, zoo.list_models())
        raise UsageError(f"Pattern must match the name of a model, got {pattern!r}.{near}")
    # Families of other packages are named without importing them; `info` knows the rest.
    others = {name: dict.fromkeys(INFO_KEYS) | {"name": name, "family": name} for name in zoo.FAMILIES.extension_names}
    return Rows(zoo.MODELS[name].info() if name in zoo.MODELS else others[name] for name in names)


@command
def info(
    model: Annotated[
        str, argument("A name of `vitrail models` or `vitrail weights`, or a bundle.", metavar="MODEL|BUNDLE")
    ],
    *,
    resolution: Annotated[
        int | tuple[int, int] | None, resolution_flag("Input size: 384, or 224x384 for height x width.")
    ] = None,
    classes: Annotated[int | None, flag("Number of classes.", metavar="K")] = None,
    channels: Annotated[int | None, flag("Input channels.", metavar="C")] = None,
    pool: Annotated[str | None, flag("Pooling before the head: cls, gap or map.", metavar="P")] = None,
    representation: Annotated[
        str | None, flag("Hidden layer of the head, for pre-training: none, tanh or gelu.", metavar="W")
    ] = None,
) -> Report:
    """Show the size and cost of a model. No weights are loaded."""
    config = find_config(model)
    changes: dict[str, Any] = {
        "resolution": None if resolution is None else as_pair(resolution),
        "classes": classes,
        "channels": channels,
        "pool": pool,
        "representation": representation,
    }
    return Report(config.replace(**{key: value for key, value in changes.items() if value is not None}).info())


@command
def recipes(
    name: Annotated[
        str | None, argument("A recipe, or a .toml file; default: list all recipes.", metavar="[NAME]")
    ] = None,
) -> Report | Rows:
    """List the recipes, or all settings of one with value, default and meaning."""
    if name is None:
        return Rows({"name": each, "purpose": purpose(recipe_text(each))} for each in recipe_names())
    from vitrail.data.preprocess import Preprocess

    recipe = find_recipe(name)
    rows = [row for row in recipe.describe() if row["setting"] not in ("augment", "margin", "preprocess", "model")]
    for table, settings in (("margin", recipe.margin), ("augment", recipe.augment)):
        rows += [row | {"setting": f"{table}.{row['setting']}"} for row in settings.describe()]
    # The defaults of these depend on the model and on DATA.
    for table, changed, meanings in (
        ("preprocess", recipe.preprocess, Preprocess.meanings()),
        ("model", recipe.model, model_settings()),
    ):
        rows += [
            {"setting": f"{table}.{key}", "value": changed.get(key), "default": None, "meaning": meaning}
            for key, meaning in (dict.fromkeys(changed, "") | meanings).items()
            if key not in ("name", "classes", "channels")
        ]
    return Report(name=name, purpose=purpose(recipe_text(name)), settings=rows)
