"""The language of the command line: English, or Korean from the message files in `vitrail/messages`.

The code writes every message in English, as an f-string. Just before a message is printed, `localise` compares it with
the English templates of the message files and returns the Korean one with the same values. In English nothing is read.

    [no-such-bundle]
    en = "Bundle must be a folder that exists, got {path}."
    ko = "번들은 존재하는 폴더여야 합니다(입력: {path})."

`{path}` stands for any text, `{count:number}` for a number. `{cause:phrases}` stands for a text that is translated
itself, by `phrases.toml`; `{reason:phrases?}` for one that stays as it is if it has no translation. A value is as short
as the rest of the template allows; one in quotes is not cut. Messages are translated sentence by sentence; a template
may have several sentences. A sentence without a template stays English.
"""

import functools
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from vitrail.core.message_files import load_messages

LANGUAGES = ("en", "ko")
PACKAGE = Path(__file__).parents[1]
FILES = {
    "help": ("messages/help.toml",),
    "messages": ("messages/errors.toml", "messages/notes.toml"),
    "phrases": ("messages/phrases.toml",),
    "headings": ("messages/headings.toml",),
    "cells": ("messages/cells.toml",),
    "settings": ("messages/settings.toml",),
}
"""The message files of each category of texts.

`help` has texts of --help, `messages` sentences, `phrases` parts of sentences, `headings` names of columns and rows,
`cells` values in tables, `settings` meanings of recipes and their settings.
"""

_MAX_LENGTH, _MAX_SENTENCES = 4000, 20  # of a message; a longer one, perhaps hostile, stays English
_MAX_JOINED = 3  # sentences of a template
_MAX_DEPTH = 4  # of texts in texts
_MAX_MATCHES = 4  # of a template and a text
_SENTENCE_GAP = re.compile(r"(?<=[.?!])(\s+)")
_NUMBER = re.compile(r"[\d,.]*\d(?:e[+-]\d+)?%?")
_PLACEHOLDER = re.compile(r"\{(\w+)(?::(\w+)(\?)?)?\}")

_language = "en"


@contextmanager
def messages_in(language: str) -> Generator[None]:
    """Print messages in `language` within the block, in all threads."""
    global _language
    before, _language = _language, language
    try:
        yield
    finally:
        _language = before


def current_language() -> str:
    """Return the language of the command line, `en` or `ko`."""
    return _language


Category = str | tuple[str, ...]
"""A category in `FILES`, or the message files of a page whose texts are printed, too: patterns below the package."""


def localise(text: str, category: Category = "messages") -> str:
    """Return a text in the language of the command line; a text without a translation unchanged."""
    if _language == "en":
        return text
    try:
        return translate(text, category) or text
    except Exception:  # a message must be printed even if the message files are missing or corrupt
        return text


class Template:
    """An English template and its Korean translation."""

    def __init__(self, english: str, korean: str) -> None:
        self.english, self.korean = english, korean
        self._start, *self._ends = _PLACEHOLDER.sub("\0", english).split("\0")
        self._fields = _PLACEHOLDER.findall(english)
        self.literal_length = len(self._start) + sum(map(len, self._ends))

    def translate(self, text: str, depth: int = 0) -> str | None:
        """Return the translation of a text, or None if the text does not match the template."""
        first_name, first_category, _ = self._fields[0]
        least = 1  # characters of the first value
        for _ in range(1 if first_category else _MAX_MATCHES):
            if (values := self._match(text, least)) is None:
                return None
            if (translations := self._translate_values(values, depth)) is not None:
                return _PLACEHOLDER.sub(lambda field: translations[field[1]], self.korean)
            least = len(values[first_name]) + 1  # a path may contain the text that follows it
        return None

    def _translate_values(self, values: dict[str, str], depth: int) -> dict[str, str] | None:
        """Return the values for the translation, or None if one is no number or has no translation."""
        translations = dict(values)
        for name, category, optional in self._fields:
            if category == "number" and not _NUMBER.fullmatch(values[name]):
                return None
            if category in FILES:
                translation = translate(values[name], category, depth + 1)
                if translation is None and not optional:
                    return None
                translations[name] = translation or values[name]
        return translations

    def _match(self, text: str, least: int) -> dict[str, str] | None:
        """Return the value of each placeholder, or None. The time is linear in the length of the text."""
        if not text.startswith(self._start) or not text.endswith(self._ends[-1]):
            return None
        values, position = {}, len(self._start)
        for index, ((name, _, _), end) in enumerate(zip(self._fields, self._ends, strict=True)):
            first = position + (least if index == 0 else 1)
            if (quote := text[position : position + 1]) in ("'", '"') and not (first := text.find(quote, first) + 1):
                return None
            is_last = index == len(self._ends) - 1
            stop = len(text) - len(end) if is_last else text.find(end, first)
            if stop < first:
                return None
            values[name] = text[position:stop]
            position = stop + len(end)
        return values


@functools.cache
def load_templates(category: Category) -> tuple[dict[str, str], tuple[Template, ...]]:
    """Return the translations of texts without placeholders, and the other templates, the most specific first."""
    exact, templates = {}, []
    patterns = FILES[category] if isinstance(category, str) else category
    for file in (file for pattern in patterns for file in sorted(PACKAGE.glob(pattern))):
        for message in load_messages(str(file)).values():
            if _PLACEHOLDER.search(message["en"]):
                templates.append(Template(message["en"], message["ko"]))
            else:
                exact[message["en"]] = message["ko"]
    templates.sort(key=lambda template: (template.english.startswith("{"), -template.literal_length))
    return exact, tuple(templates)


@functools.cache
def _templates_for(category: Category, initial: str) -> list[Template]:
    """Return the templates that a text with this first character may match."""
    return [template for template in load_templates(category)[1] if template.english[0] in ("{", initial)]


@functools.lru_cache(maxsize=512)
def translate(text: str, category: Category = "messages", depth: int = 0) -> str | None:
    """Return a text in Korean, or None if none of its sentences has a template."""
    pieces = _SENTENCE_GAP.split(text) if len(text) <= _MAX_LENGTH else []  # sentences, with the gaps between them
    if depth > _MAX_DEPTH or len(pieces) > 2 * _MAX_SENTENCES:
        return None
    translations, first = [], 0
    while first < len(pieces):
        # The shortest sequence of sentences that has a template: a value must not take the next sentence.
        for last in range(first + 1, min(first + 2 * _MAX_JOINED, len(pieces) + 1), 2):
            if (translation := _translate_piece("".join(pieces[first:last]), category, depth)) is not None:
                break
        else:
            last, translation = first + 1, pieces[first]
        translations += [translation, *pieces[last : last + 1]]
        first = last + 1
    translated = "".join(translations)
    return None if translated == text else translated


def _translate_piece(piece: str, category: Category, depth: int) -> str | None:
    exact, _ = load_templates(category)
    if piece in exact:
        return exact[piece]
    templates = _templates_for(category, piece[:1])
    return next((korean for template in templates if (korean := template.translate(piece, depth)) is not None), None)
