"""Commands that describe what there is: models, recipes, public checkpoints."""

import sys
from typing import Annotated, Any

import tyro

from vitrail.api.flags import (
    Json,
    arg,
    parse_resolution,
)
from vitrail.bundles.catalogue import list_published
from vitrail.bundles.folder import find_config
from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.terminal import (
    cell,
    print_json,
    print_table,
    printable,
    say,
    setting_cell,
)
from vitrail.models import zoo
from vitrail.models.config import INFO_KEYS, model_settings
from vitrail.training.recipe import find_recipe, purpose, recipe_names, recipe_text


def models(
    pattern: Annotated[
        str, tyro.conf.Positional, arg(metavar="[PATTERN]", help="Only names like this one: 'ViT*', '*/16', ViT-B.")
    ] = "*",
    *,
    json: Json = False,
) -> None:
    """List all models, or those that match a pattern, with their parameters, multiply-accumulates and shapes."""
    names = zoo.list_models(pattern) or zoo.list_models(f"{pattern}*" if pattern else "")
    if not names:
        near = did_you_mean(pattern, zoo.list_models())
        raise UsageError(f"Pattern must match the name of a model, got {pattern!r}.{near}")
    # Families of other packages are named without importing them; `info` knows the rest.
    others = {name: dict.fromkeys(INFO_KEYS) | {"name": name, "family": name} for name in zoo.FAMILIES.added}
    rows = [zoo.MODELS[name].info() if name in zoo.MODELS else others[name] for name in names]
    if json:
        return print_json(rows)
    headers = ("name", "family", "parameters", "MACs", "tokens", "resolution", "patch", "width", "depth", "heads")
    keys = [header.lower() for header in headers]
    shape = ("heads", "patch", "width", "depth", "resolution", "tokens", "MACs", "family")
    return print_table(headers, [[cell(row[key]) for key in keys] for row in rows], droppable=shape)


def info(
    model: Annotated[
        str,
        tyro.conf.Positional,
        arg(metavar="MODEL|BUNDLE", help="A name of `vitrail models` or `vitrail weights`, or a bundle."),
    ],
    *,
    resolution: Annotated[str | None, arg(metavar="R", help="Input size: 384, or 224x384 for height x width.")] = None,
    classes: Annotated[int | None, arg(metavar="K", help="Number of classes.")] = None,
    channels: Annotated[int | None, arg(metavar="C", help="Input channels.")] = None,
    pool: Annotated[str | None, arg(metavar="P", help="Pooling before the head: cls, gap or map.")] = None,
    representation: Annotated[
        str | None, arg(metavar="W", help="Hidden layer of the head, for pre-training: none, tanh or gelu.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the size and cost of a model. No weights are loaded."""
    config = find_config(model)
    for note in zoo.alias_notes(model):
        say(f"note: {note}")
    changes: dict[str, Any] = {
        "resolution": None if resolution is None else parse_resolution(resolution),
        "classes": classes,
        "channels": channels,
        "pool": pool,
        "representation": representation,
    }
    row = config.replace(**{key: value for key, value in changes.items() if value is not None}).info()
    if json:
        return print_json(row)
    return print_table(None, [[key, cell(value)] for key, value in row.items()])


def recipes(
    name: Annotated[
        str | None,
        tyro.conf.Positional,
        arg(metavar="[NAME]", help="A recipe, or a .toml file; default: list all recipes."),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """List the recipes, or all settings of one with value, default and meaning."""
    if name is not None:
        return _show_recipe(name, json=json)
    rows = [{"name": known, "purpose": purpose(recipe_text(known))} for known in recipe_names()]
    if json:
        return print_json(rows)
    return print_table(None, [[row["name"], row["purpose"]] for row in rows])


def _show_recipe(name: str, *, json: bool) -> None:
    from vitrail.data.preprocess import Preprocess

    recipe, about = find_recipe(name), purpose(recipe_text(name))
    rows = [row for row in recipe.describe() if row["setting"] not in ("augment", "margin", "preprocess", "model")]
    for table, settings in (("margin", recipe.margin), ("augment", recipe.augment)):
        rows += [row | {"setting": f"{table}.{row['setting']}"} for row in settings.describe()]
    # The defaults of these depend on the model and on DATA.
    for table, given, meanings in (
        ("preprocess", recipe.preprocess, Preprocess.meanings()),
        ("model", recipe.model, model_settings()),
    ):
        rows += [
            {"setting": f"{table}.{key}", "value": given.get(key), "default": None, "meaning": meaning}
            for key, meaning in (dict.fromkeys(given, "") | meanings).items()
            if key not in ("name", "classes", "channels")
        ]
    if json:
        return print_json({"name": name, "purpose": about, "settings": rows})
    sys.stdout.write(f"{printable(about)}\n\n")
    cells = [[row["setting"], *map(setting_cell, (row["value"], row["default"])), row["meaning"]] for row in rows]
    return print_table(("setting", "value", "default", "meaning"), cells)


def weights(
    pattern: Annotated[
        str,
        tyro.conf.Positional,
        arg(metavar="[PATTERN]", help="Only names, models or repositories like this one: vit-b16, dino, '*in21k'."),
    ] = "*",
    *,
    json: Json = False,
) -> None:
    """List public checkpoints that `vitrail convert NAME DST` fetches and reads. Nothing is fetched here."""
    found = list_published(pattern)
    if json:
        return print_json([one.to_json() for one in found])
    rows = []
    for one in found:
        linear = "" if one.linear is None else f"{one.linear:.1f} linear"
        score = linear if one.accuracy is None else f"{one.accuracy:.1f}"
        shape = [one.model, f"{one.config.parameters:,}", f"{one.pixels}", f"{one.classes:,}" if one.classes else "-"]
        rows.append([one.name, *shape, score or "-", one.source or "-", one.licence, one.address])
    headers = ("name", "model", "parameters", "pixels", "classes", "accuracy %", "source", "licence", "where")
    return print_table(headers, rows, droppable=("where", "source", "classes", "licence", "model"))
