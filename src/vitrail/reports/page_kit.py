"""Building blocks of HTML pages. All untrusted text goes through `escape`."""

import base64
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitrail.core.html import Html, escape
from vitrail.data.thumbnail import image_data_url
from vitrail.reports.translations import attribute_text

LANGUAGE_BUTTON = Html('<button id="language" type="button">English / 한국어</button>')


def page(title: str, subtitle: str, body: str, script: str = "", *, style: str = "", refresh: int = 0) -> str:
    """Return a complete HTML document. Title and subtitle may be markup.

    `style` follows the common style sheet. The content security policy allows only `script`, by its hash. A browser
    reloads the page every `refresh` seconds, or never if that is 0.
    """
    script_policy = ""
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        script_policy = f"; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy"'
        f" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'{script_policy}\">"
        + (f'<meta http-equiv="refresh" content="{refresh}">' if refresh else "")
        + f"<title>{attribute_text(title)}</title><style>{stylesheet()}{style}</style></head><body>\n"
        f'<header><h1>{escape(title)}</h1><p class="quiet">{escape(subtitle)}</p></header>\n<main>{body}</main>\n'
        + (f"<script>{script}</script>" if script else "")
        + "</body></html>\n"
    )


def bilingual_page(
    title: str, subtitle: str, body: str, *, links: str = "", script: str = "", style: str = "", refresh: int = 0
) -> str:
    """Return a complete document with the button that changes the language, followed by `links`.

    `script` follows the script of the button.
    """
    language_script = Path(__file__).with_name("language.js").read_text(encoding="utf-8")
    nav = f"<nav>{LANGUAGE_BUTTON}{f' {links}' if links else ''}</nav>"
    return page(title, subtitle, nav + body, language_script + script, style=style, refresh=refresh)


@functools.cache
def stylesheet() -> str:
    """Return the common style sheet."""
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def headline_numbers(pairs: Sequence[tuple[str, str]]) -> Html:
    """Return a row of large numbers with captions, from pairs of caption and number."""
    cells = "".join(f"<div><b>{escape(number)}</b>{escape(caption)}</div>" for caption, number in pairs)
    return Html(f'<div class="numbers">{cells}</div>')


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    numeric: frozenset[int] = frozenset(),
    *,
    stacks: bool = False,
) -> Html:
    """Return a table. Columns with an index in `numeric` are right-aligned.

    With `stacks`, a narrow screen shows each row as a list below its first cell, and no column is out of sight.
    """

    def cells(tag: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=number' if index in numeric else ''}>"
            f"{column_name(index) if tag == 'td' else ''}{escape(cell)}</{tag}>"
            for index, cell in enumerate(row)
        )

    def column_name(column: int) -> str:
        return f'<span class="column-name">{escape(headers[column])}</span>' if stacks and column else ""

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    css_class = ' class="stacks"' if stacks else ""
    head = f"<thead><tr>{cells('th', headers)}</tr></thead>"
    return Html(f'<div class="scroll"><table{css_class}>{head}<tbody>{body}</tbody></table></div>')


def figure(title: str, note: str, content: str) -> Html:
    """Return a figure with title and note."""
    return Html(f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>{content}</figure>")


def image(pixels_HWC: np.ndarray, text: str) -> str:
    """Return pixels as an inline image with alternative text."""
    return f'<img src="{image_data_url(pixels_HWC)}" alt="{escape(text)}">'
