"""The commands `models`, `info` and `recipes`, which list models, their sizes and costs, and training recipes."""

from typing import Annotated, Any

from vitrail.api.parameters import as_pair, command, resolution_flag
from vitrail.api.results import Report, Rows
from vitrail.bundles.folder import find_config, find_licence
from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.flags import argument, flag
from vitrail.models import zoo
from vitrail.models.config import INFO_KEYS, model_settings
from vitrail.training.recipe import find_recipe, recipe_names, recipe_purpose, recipe_text


@command
def models(
    pattern: Annotated[
        str, argument("Show only models whose name matches: 'ViT*', '*/16', ViT-B.", metavar="[PATTERN]")
    ] = "*",
) -> Rows:
    """List models with their parameters, multiply-accumulates and shapes."""
    names = zoo.list_models(pattern) or zoo.list_models(f"{pattern}*" if pattern else "")
    if not names:
        suggestion = did_you_mean(pattern, zoo.list_models())
        raise UsageError(f"Pattern must match the name of a model, got {pattern!r}.{suggestion}")
    # Families of other packages are not imported, so that the list stays fast; `info` shows their sizes.
    extensions = {
        name: dict.fromkeys(INFO_KEYS) | {"name": name, "family": name} for name in zoo.FAMILIES.extension_names
    }
    return Rows(zoo.MODELS[name].info() if name in zoo.MODELS else extensions[name] for name in names)


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
    channels: Annotated[int | None, flag("Number of input channels.", metavar="C")] = None,
    pool: Annotated[str | None, flag("Pooling before the head: cls, gap or map.", metavar="P")] = None,
    representation: Annotated[
        str | None, flag("Hidden layer of the head, as used for pre-training: none, tanh or gelu.", metavar="W")
    ] = None,
) -> Report:
    """Show the size and cost of a model.

    The numbers are computed from its configuration; no weights are loaded. For a bundle or a public checkpoint, the
    licence of the weights is shown, too.
    """
    config = find_config(model)
    changes: dict[str, Any] = {
        "resolution": None if resolution is None else as_pair(resolution),
        "classes": classes,
        "channels": channels,
        "pool": pool,
        "representation": representation,
    }
    report = Report(config.replace(**{key: value for key, value in changes.items() if value is not None}).info())
    if (licence := find_licence(model)) is not None:
        report["licence"] = licence
    return report


@command
def recipes(
    name: Annotated[
        str | None, argument("A recipe of the package, or a .toml file; default: list all recipes.", metavar="[NAME]")
    ] = None,
) -> Report | Rows:
    """List the training recipes, or all settings of one.

    Each setting is shown with its value, default and meaning.
    """
    if name is None:
        return Rows({"name": name, "purpose": recipe_purpose(recipe_text(name))} for name in recipe_names())
    from vitrail.data.preprocess import Preprocess

    recipe = find_recipe(name)
    rows = [row for row in recipe.describe() if row["setting"] not in ("augment", "margin", "preprocess", "model")]
    for table, settings in (("margin", recipe.margin), ("augment", recipe.augment)):
        rows += [row | {"setting": f"{table}.{row['setting']}"} for row in settings.describe()]
    # The defaults of these tables depend on the model and on DATA.
    for table, changes, meanings in (
        ("preprocess", recipe.preprocess, Preprocess.meanings()),
        ("model", recipe.model, model_settings()),
    ):
        rows += [
            {"setting": f"{table}.{key}", "value": changes.get(key), "default": None, "meaning": meaning}
            for key, meaning in (dict.fromkeys(changes, "") | meanings).items()
            if key not in ("name", "classes", "channels")
        ]
    return Report(name=name, purpose=recipe_purpose(recipe_text(name)), settings=rows)
