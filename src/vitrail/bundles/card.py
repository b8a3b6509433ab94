"""The model card (README.md) of a bundle, for people and for model hubs."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from vitrail.core.errors import UsageError
from vitrail.core.settings import pluralise
from vitrail.models.config import ModelConfig

_LISTED = 20  # entries of a long list or table that a card shows

# Licences that the Hugging Face Hub knows. Others are written as `license: other` with a `license_name`.
_LICENCES = re.compile(
    r"apache-2\.0|mit|bsd(-[23]-clause)?|isc|cc0-1\.0|cc-by(-(nc|sa|nd|nc-sa|nc-nd))?-[234]\.[05]|(a|l)?gpl-3\.0|gpl-2\.0"
    r"|mpl-2\.0|openrail|unlicense|unknown|other"
)

_MAX_LICENCE = 200  # characters


def check_licence(licence: str) -> str:
    """Return a licence that the user states. Raise UsageError unless it is one line of printable text."""
    if not licence.strip() or not licence.isprintable() or len(licence) > _MAX_LICENCE:
        raise UsageError(
            f"Licence must be one line of 1 to {_MAX_LICENCE} printable characters, got {licence[:_MAX_LICENCE]!r}."
            " Give its name, such as cc-by-4.0."
        )
    return licence.strip()


def model_card(
    config: ModelConfig, provenance: dict[str, Any], *, library: str = "vitrail", use: Sequence[str] | None = None
) -> str:
    """Return the model card as Markdown, with the front matter that model hubs read. `use` is the Python code that runs
    the model in `library`."""
    info = config.info()
    height, width = info["resolution"]
    predicts = config.predicts
    tasks = {"classes": "image-classification", "pixels": "unconditional-image-generation"}
    task = tasks.get(predicts, "image-feature-extraction")
    if use is None and predicts == "classes":
        use = ["import vitrail", 'print(vitrail.Classifier("path/to/this/folder").predict(["image.png"]))']
    elif use is None:
        use = ["import vitrail", 'model = vitrail.load("path/to/this/folder").model']
    licence = str(provenance.get("licence", "unknown"))
    terms = [f"license: {json.dumps(licence)}"]
    if not _LICENCES.fullmatch(licence.lower()):
        terms = ["license: other", f"license_name: {json.dumps(licence)}"]
    lines = [
        "---",
        f"library_name: {library}",
        f"pipeline_tag: {task}",
        *terms,
        f"tags: [{task}, {info['family']}]",
        "---",
        f"# {info['name'] or info['family']}",
        "",
        f"{info['parameters']:,} parameters, {info['macs']:,} multiply-accumulates for one image of"
        f" {height} x {width} pixels with {pluralise(info['channels'], 'channel')}, {info['classes']:,} classes.",
        "",
        "```python",
        *use,
        "```",
        "",
        "## Where it comes from",
        "",
        *(line for key, value in provenance.items() for line in _list_item(key, value)),
    ]
    if not provenance:
        lines.append("Nothing is recorded.")
    return "\n".join(lines) + "\n"


def _list_item(name: str, value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a provenance entry as an item of a Markdown list. Its own entries become a nested list."""
    match value:
        case {**entries} if entries:
            nested_lines = [
                line
                for key, entry in islice(entries.items(), _LISTED)
                for line in _list_item(key, entry, f"{indent}  ")
            ]
        case [*entries] if any(isinstance(entry, str | list | dict) for entry in entries):
            nested_lines = [f"{indent}  - {_format_value(entry)}" for entry in entries[:_LISTED]]
        case _:
            text = _format_value(value)
            text = f"`{text}`" if name == "command" and "`" not in text else text
            yield f"{indent}- {_format_key(name)}: {text}"
            return
    yield f"{indent}- {_format_key(name)}:"
    yield from nested_lines
    if len(entries) > _LISTED:
        yield f"{indent}  - and {len(entries) - _LISTED:,} more, in provenance.json"


def _format_key(key: str) -> str:
    """Return the text for a key of the provenance. Keys that are not identifiers, such as file names, stay as they
    are."""
    return key.replace("_", " ") if key.isidentifier() else _format_value(key)


def _format_value(value: Any) -> str:
    """Return a value of the provenance as text on one line."""
    match value:
        case None | []:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case [*entries]:
            return ", ".join(map(_format_value, entries))
        case {**entries}:
            return ", ".join(f"{_format_key(key)} {_format_value(entry)}" for key, entry in entries.items()) or "none"
    return " ".join(str(value).split())
