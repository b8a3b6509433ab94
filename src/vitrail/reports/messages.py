"""Sentences of a page in English and Korean, from TOML files beside the modules that say them, and the button that
changes the language."""

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.core.html import Html, escape
from vitrail.reports.page import in_language

Words = Mapping[str, Mapping[str, str]]
"""Sentences by name and language; {fields} in them are filled in."""

LANGUAGES = ("en", "ko")
LANGUAGE_BUTTON = Html('<button id="language" type="button">English / 한국어</button>')


def language_script() -> str:
    """The script of the button, for a page that has no other."""
    return Path(__file__).with_name("language.js").read_text(encoding="utf-8")


def words_beside(file: str) -> Words:
    """The sentences in the TOML file that has the name of a Python file."""
    return tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))


def word(name: str, tag: str = "span", *, words: Words, **fields: Any) -> Html:
    """A sentence in both languages, of which the page shows one; English where there is no other. A field may be such a
    sentence itself."""

    def speak(language: str) -> str:
        text = words[name].get(language, words[name]["en"])
        spoken = {
            key: in_language(value, language) if isinstance(value, str) else value for key, value in fields.items()
        }
        return f'<{tag} class="{language}" lang="{language}">{escape(text.format(**spoken))}</{tag}>'

    return Html("".join(map(speak, LANGUAGES)))


def speak_from(words: Words) -> Callable[..., Html]:
    """`word` for these sentences: of a name, a tag and fields."""
    return partial(word, words=words)


def both(english: str, korean: Mapping[str, str], tag: str = "span") -> Html:
    """Text that others wrote in English, with its Korean if that is known."""
    if english not in korean:
        return escape(english)
    return word("text", tag, words={"text": {"en": "{it}", "ko": korean[english]}}, it=english)
