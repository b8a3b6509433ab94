"""The model card: what a bundle says of itself to people and to model hubs."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from vitrail.core.settings import pluralise
from vitrail.models.config import ModelConfig

_LISTED = 20  # entries of a long list or table that a card shows

# Licences that the Hugging Face Hub has a word for; it takes others as "other", with a name beside.
_LICENCES = re.compile(
    r"apache-2\.0|mit|bsd(-[23]-clause)?|isc|cc0-1\.0|cc-by(-(nc|sa|nd|nc-sa|nc-nd))?-[234]\.[05]|(a|l)?gpl-3\.0|gpl-2\.0"
    r"|mpl-2\.0|openrail|unlicense|unknown|other"
)


def model_card(
    config: ModelConfig, provenance: dict[str, Any], *, library: str = "vitrail", use: Sequence[str] | None = None
) -> str:
    """The model card, with the front matter that model hubs read; `use` is the Python that runs the model in a
    library."""
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
        *(line for key, value in provenance.items() for line in _item(key, value)),
    ]
    if not provenance:
        lines.append("Nothing is recorded.")
    return "\n".join(lines) + "\n"


def _item(name: str, value: Any, indent: str = "") -> Iterator[str]:
    """An entry of the provenance as an item of a Markdown list; what it contains is a list below it."""
    match value:
        case {**entries} if entries:
            inside = [line for key, one in islice(entries.items(), _LISTED) for line in _item(key, one, f"{indent}  ")]
        case [*entries] if any(isinstance(one, str | list | dict) for one in entries):
            inside = [f"{indent}  - {_in_words(one)}" for one in entries[:_LISTED]]
        case _:
            text = _in_words(value)
            text = f"`{text}`" if name == "command" and "`" not in text else text
            yield f"{indent}- {_name(name)}: {text}"
            return
    yield f"{indent}- {_name(name)}:"
    yield from inside
    if len(entries) > _LISTED:
        yield f"{indent}  - and {len(entries) - _LISTED:,} more, in provenance.json"


def _name(key: str) -> str:
    """A key in words; the names of files are keys, too."""
    return key.replace("_", " ") if key.isidentifier() else _in_words(key)


def _in_words(value: Any) -> str:
    """A value on one line."""
    match value:
        case None | []:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case [*entries]:
            return ", ".join(map(_in_words, entries))
        case {**entries}:
            return ", ".join(f"{_name(key)} {_in_words(one)}" for key, one in entries.items()) or "none"
    return " ".join(str(value).split())
