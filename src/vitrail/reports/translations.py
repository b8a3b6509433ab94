"""Messages of pages in English and Korean. They come from the TOML file beside the module that shows them."""

import html
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vitrail.core.html import Html, escape
from vitrail.core.message_files import Messages

LANGUAGES = ("en", "ko")


def translate(name: str, tag: str = "span", *, messages: Messages, **fields: Any) -> Html:
    """Return a message as one element per language. The style sheet hides the other language.

    A message without a translation is shown in English. A field may be the result of `translate`.
    """

    def element(language: str) -> str:
        text = messages[name].get(language, messages[name]["en"])
        plain_fields = {
            key: in_language(field, language) if isinstance(field, str) else field for key, field in fields.items()
        }
        return f'<{tag} class="{language}" lang="{language}">{escape(text.format(**plain_fields))}</{tag}>'

    return Html("".join(map(element, LANGUAGES)))


def translator(messages: Messages) -> Callable[..., Html]:
    """Return `translate` for these messages. It takes a name, a tag and fields."""
    return partial(translate, messages=messages)


def with_korean(english: str, korean: Mapping[str, str], tag: str = "span") -> Html:
    """Return English text of a plugin with its Korean translation, if there is one."""
    if english not in korean:
        return escape(english)
    return translate("text", tag, messages={"text": {"en": "{english}", "ko": korean[english]}}, english=english)


def in_language(text: str, language: str) -> str:
    """Return the part of markup that is in a language, as plain text. Plain text is returned unchanged."""
    if not isinstance(text, Html):
        return text
    other = "ko" if language == "en" else "en"
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(rf'<(\w+) class="{other}".*?</\1>', "", text)))


def attribute_text(text: str, language: str = "en") -> Html:
    """Return `in_language`, escaped for an attribute or a title element."""
    return Html(html.escape(in_language(text, language), quote=True))
