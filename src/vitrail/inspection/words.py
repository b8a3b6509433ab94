"""Sentences of the page in English and Korean. `words.toml` has those of the page itself and of several panels."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.pages.page import Html, escape

Words = Mapping[str, Mapping[str, str]]
"""Sentences by name and language, with {placeholders}."""

LANGUAGES = ("en", "ko")


def words_beside(file: str) -> Words:
    """The sentences in the TOML file that has the name of a Python file."""
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))


SHARED = words_beside(__file__)


def word(name: str, tag: str = "span", *, words: Words = SHARED, **fields: Any) -> Html:
    """A sentence in both languages, of which the page shows one; English if there is no Korean."""
    texts = {language: words[name].get(language, words[name]["en"]) for language in LANGUAGES}
    return Html(
        "".join(
            f'<{tag} class="{language}" lang="{language}">{escape(text.format(**fields))}</{tag}>'
            for language, text in texts.items()
        )
    )
