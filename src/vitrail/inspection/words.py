"""What pages say, in English and Korean, from `words.toml`."""

import functools
import tomllib
from importlib import resources
from typing import Any

from vitrail.pages.page import Html, escape


@functools.cache
def words() -> dict[str, dict[str, str]]:
    """Every sentence by its name and language."""
    return tomllib.loads(resources.files("vitrail.inspection").joinpath("words.toml").read_text(encoding="utf-8"))


def english(name: str, **fields: Any) -> str:
    """A sentence as plain text, for programs."""
    return words()[name]["en"].format(**fields)


def word(name: str, tag: str = "span", **fields: Any) -> Html:
    """A few words in both languages, of which the page shows one."""
    return Html(
        "".join(
            f'<{tag} class="{language}" lang="{language}">{escape(text.format(**fields))}</{tag}>'
            for language, text in words()[name].items()
        )
    )


def say(name: str, **fields: Any) -> Html:
    """The same as paragraphs."""
    return word(name, "p", **fields)
