"""The language of the command line: English, or Korean from the message files in `vitrail/messages`.

The code writes every message in English, as an f-string. Just before a message is printed, `localise` compares it with
the English templates of the message files and returns the Korean one with the same values. In English nothing is read.

    [no-such-bundle]
    en = "Bundle must be a folder that exists, got {path}."
    ko = "번들은 있는 폴더여야 합니다(입력: {path})."

`{path}` stands for any text, `{count:number}` for a number. `{cause:phrases}` stands for a text that is translated
itself, by `phrases.toml`; `{reason:phrases?}` for one that stays as it is if it has no translation. A message of
several sentences is translated as a whole if there is a template for it, otherwise sentence by sentence. A sentence
without a template stays English.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from vitrail.core.errors import UsageError
from vitrail.core.message_files import load_messages

LANGUAGES = ("en", "ko")
MESSAGE_FOLDER = Path(__file__).parents[1] / "messages"
FILES = {
    "help": ("help",),
    "messages": ("errors", "notes"),
    "phrases": ("phrases",),
    "headings": ("headings",),
    "cells": ("cells",),
}
"""The message files of each category of texts.

`help` has texts of --help, `messages` sentences, `phrases` parts of sentences, `headings` names of columns and rows,
`cells` values in tables.
"""

_MAX_LENGTH = 4000  # characters of a message; a longer one stays English
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
_NUMBER = r"[\d,.]*\d(?:e[+-]\d+)?%?"
_PLACEHOLDER = re.compile(r"\{(\w+)(?::(\w+)(\?)?)?\}")

_language = "en"


def find_language(environ: Mapping[str, str]) -> str:
    """Return the language that the environment asks for: VITRAIL_LANG, otherwise the locale. The default is English.

    Raise UsageError if VITRAIL_LANG is neither en nor ko. Korean needs streams that can encode it.
    """
    own = environ.get("VITRAIL_LANG", "")
    if own and _language_code(own) not in LANGUAGES:
        raise UsageError(f"VITRAIL_LANG must be {' or '.join(LANGUAGES)}, got {own!r}.")
    names = (own, *(environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG")))
    code = _language_code(next(filter(None, names), ""))
    return "ko" if code == "ko" and all(map(_can_encode_korean, (sys.stdout, sys.stderr))) else "en"


def _language_code(locale: str) -> str:
    """Return `ko` for `ko_KR.UTF-8`."""
    return re.split(r"[_.@-]", locale.lower())[0]


def _can_encode_korean(stream: object) -> bool:
    try:
        "한국어".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@contextlib.contextmanager
def messages_in(language: str) -> Generator[None]:
    """Print messages in `language` within the block, in all threads."""
    global _language
    before, _language = _language, language
    try:
        yield
    finally:
        _language = before


def localise(text: str, category: str = "messages") -> str:
    """Return a text in the language of the command line; a text without a translation unchanged."""
    if _language == "en":
        return text
    return translate(text, category) or text


class Template:
    """An English template and its Korean translation."""

    def __init__(self, english: str, korean: str) -> None:
        self.english, self.korean = english, korean
        *self._literals, self.end = _PLACEHOLDER.sub("\0", english).split("\0")
        self.literal_length = sum(map(len, self._literals)) + len(self.end)
        self.fields = {name: (category, bool(optional)) for name, category, optional in _PLACEHOLDER.findall(english)}

    def translate(self, text: str) -> str | None:
        """Return the translation of a text, or None if it does not match the template."""
        if not self._may_match(text) or not (match := self._pattern.fullmatch(text)):
            return None
        values = match.groupdict()
        for name, (category, is_optional) in self.fields.items():
            if category in FILES:
                if (translation := translate(values[name], category)) is not None:
                    values[name] = translation
                elif not is_optional:
                    return None
        return _PLACEHOLDER.sub(lambda field: values[field[1]], self.korean)

    def _may_match(self, text: str) -> bool:
        """Return False if the text lacks a part of the template. This is much faster than the pattern."""
        position = 0
        for literal in self._literals:
            if (position := text.find(literal, position)) < 0:
                return False
            position += len(literal)
        return text.endswith(self.end)

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        source, position, seen = "", 0, set()
        for field in _PLACEHOLDER.finditer(self.english):
            name = field[1]
            source += re.escape(self.english[position : field.start()])
            values = _NUMBER if field[2] == "number" else ".+?"
            source += f"(?P={name})" if name in seen else f"(?P<{name}>{values})"
            position = field.end()
            seen.add(name)
        return re.compile(source + re.escape(self.english[position:]), re.DOTALL)


@functools.cache
def load_templates(category: str) -> tuple[dict[str, str], tuple[Template, ...]]:
    """Return the translations of texts without placeholders, and the other templates, the most specific first."""
    exact, templates = {}, []
    for file in FILES[category]:
        for message in load_messages(str(MESSAGE_FOLDER / f"{file}.toml")).values():
            if _PLACEHOLDER.search(message["en"]):
                templates.append(Template(message["en"], message["ko"]))
            else:
                exact[message["en"]] = message["ko"]
    return exact, tuple(sorted(templates, key=lambda template: -template.literal_length))


@functools.lru_cache(maxsize=512)
def translate(text: str, category: str = "messages") -> str | None:
    """Return a text in Korean, or None if none of its sentences has a template."""
    content = text.strip()
    if not content or len(content) > _MAX_LENGTH:
        return None
    starts = [0, *(gap.end() for gap in _SENTENCE_END.finditer(content))]
    ends = [*(gap.start() for gap in _SENTENCE_END.finditer(content)), len(content)]
    # The best translation of the sentences from each one to the end: the fewest characters in English, and then the
    # shortest pieces, because a placeholder must not take the next sentence.
    best: dict[int, tuple[int, int, str]] = {len(starts): (0, 0, "")}
    for first in reversed(range(len(starts))):
        candidates = []
        for last in range(first, len(starts)):
            piece = content[starts[first] : ends[last]]
            translation = _translate_piece(piece, category)
            if translation is None and last > first:
                continue
            left, pieces, rest = best[last + 1]
            english = 0 if translation is not None else len(piece)
            gap = content[ends[last] : starts[last + 1]] if last + 1 < len(starts) else ""
            candidates.append(
                (left + english, pieces - 1, (piece if translation is None else translation) + gap + rest)
            )
        best[first] = min(candidates, key=lambda candidate: candidate[:2])
    english, _, translation = best[0]
    return None if english and translation == content else text.replace(content, translation, 1)


def _translate_piece(piece: str, category: str) -> str | None:
    exact, templates = load_templates(category)
    if piece in exact:
        return exact[piece]
    return next(filter(None, (template.translate(piece) for template in templates)), None)
