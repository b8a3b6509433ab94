"""Sentences of a page in English and Korean, from TOML files beside the modules that say them, and the button that
changes the language."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vitrail.core.html import Html, escape
from vitrail.core.message_files import Messages
from vitrail.reports.page import in_language, page

LANGUAGES = ("en", "ko")
LANGUAGE_BUTTON = Html('<button id="language" type="button">English / 한국어</button>')


def bilingual_page(title: str, subtitle: str, body: str, *, links: str = "", style: str = "", refresh: int = 0) -> str:
    """A complete document with the button that changes the language, and links beside it."""
    script = Path(__file__).with_name("language.js").read_text(encoding="utf-8")
    nav = f"<nav>{LANGUAGE_BUTTON}{f' {links}' if links else ''}</nav>"
    return page(title, subtitle, nav + body, script, style=style, refresh=refresh)


def word(name: str, tag: str = "span", *, words: Messages, **fields: Any) -> Html:
    """A sentence in both languages, of which the page shows one; English where there is no other. A field may be such a
    sentence itself."""

    def speak(language: str) -> str:
        text = words[name].get(language, words[name]["en"])
        spoken = {
            key: in_language(value, language) if isinstance(value, str) else value for key, value in fields.items()
        }
        return f'<{tag} class="{language}" lang="{language}">{escape(text.format(**spoken))}</{tag}>'

    return Html("".join(map(speak, LANGUAGES)))


def speak_from(words: Messages) -> Callable[..., Html]:
    """`word` for these sentences: of a name, a tag and fields."""
    return partial(word, words=words)


def both(english: str, korean: Mapping[str, str], tag: str = "span") -> Html:
    """Text that others wrote in English, with its Korean if that is known."""
    if english not in korean:
        return escape(english)
    return word("text", tag, words={"text": {"en": "{it}", "ko": korean[english]}}, it=english)
