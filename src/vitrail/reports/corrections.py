"""Controls on pages of images to choose the right label of an image, and to save the choices as `corrections.csv`.

`data.corrections` reads the file. Each page has a copy of the script, so it works from disk and without a server.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from vitrail.core.files import escape_surrogates
from vitrail.core.html import Html, escape
from vitrail.core.message_files import load_messages
from vitrail.data.decode import StoredImage
from vitrail.reports.translations import attribute_text, translator

t = translator(load_messages(__file__))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correctable:
    """An image whose label can be corrected on a page."""

    name: str
    """Name in `corrections.csv`; empty if the image cannot be corrected."""
    label: str = ""
    """Its label, if the data has labels."""
    guess: str = ""
    """The label that is likely right, if it is another one."""

    @property
    def attributes(self) -> Html:
        """Attributes of its element, which the script reads."""
        if not self.name:
            return Html("")
        values = {"file": self.name, "label": self.label, "guess": self.guess}
        return Html("".join(f' data-{name}="{_attribute(value)}"' for name, value in values.items() if value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrectionControls:
    """The controls of the pages of one command."""

    selectable_labels: Sequence[tuple[str, str]]
    """Labels to choose from, each with the text that the page shows."""
    key: str
    """Key under which the browser stores the corrections, so that all pages of a folder share them."""
    previous: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Corrections that were applied before. They are saved, too, so that one file has all corrections."""

    @property
    def introduction(self) -> Html:
        """A paragraph about the controls. The script shows it."""
        flag = "<p><code>--corrections corrections.csv</code></p>"
        return Html(f'<div class="about-corrections" hidden>{t("about-corrections", "p")}{flag}</div>')

    @property
    def bar(self) -> Html:
        """A bar that is always in view, with the number of corrections and the buttons to save and to clear them.

        It is followed by the templates from which the script makes the controls of each image.
        """
        options = [
            _fixed_option("no-change", choice="none"),
            _fixed_option("leave-out", choice="out"),
            *(f'<option value="{_attribute(label)}">{escape(text)}</option>' for label, text in self.selectable_labels),
        ]
        previous = _attribute(json.dumps({escape_surrogates(name): label for name, label in self.previous.items()}))
        question = f'data-en="{_message("really-clear", "en")}" data-ko="{_message("really-clear", "ko")}"'
        return Html(
            f'<aside id="corrections" data-key="{self.key}" data-previous="{previous}" hidden>'
            f'<output>{t("corrected")} <b>0</b></output><button id="save" type="button">{t("save")}</button>'
            f'<button id="clear" type="button" {question}>{t("clear")}</button></aside>'
            f'<template id="mark"><button type="button">{t("mark")}</button></template>'
            f'<template id="choice"><label>{t("right-label")}<select>{"".join(options)}</select></label></template>'
        )

    @property
    def script(self) -> str:
        """The script of the pages, which follows that of the language button."""
        return Path(__file__).with_name("corrections.js").read_text(encoding="utf-8")


def photo_link(image: object, folder: Path) -> str:
    """Return the URL of an image file, relative to a page in `folder`; empty for pixels and members of archives."""
    if not isinstance(image, str) or isinstance(image, StoredImage):
        return ""
    path = os.path.relpath(os.path.abspath(image), os.path.abspath(folder))  # noqa: PTH100
    return quote(os.fsencode(path))


def storage_key(texts: Iterable[str]) -> str:
    """Return the storage key of pages with these texts: other pages have another key."""
    return hashlib.sha256(escape_surrogates("\0".join(texts)).encode()).hexdigest()[:16]


def _fixed_option(message: str, *, choice: str) -> str:
    """Return an option that is not a label. The script reads `choice` and fills in the text in the page's language."""
    texts = " ".join(f'data-{language}="{_message(message, language)}"' for language in ("en", "ko"))
    return f'<option value="" data-choice="{choice}" {texts}></option>'


def _message(name: str, language: str) -> Html:
    return attribute_text(t(name), language)


def _attribute(text: str) -> str:
    """Escape text for an attribute. Browsers read a carriage return as a line feed unless it is escaped."""
    return escape(text).replace("\r", "&#13;")
