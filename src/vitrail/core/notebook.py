"""HTML of results in notebooks: small, in the colours of the notebook, without scripts. All text is escaped."""

from collections.abc import Sequence

from vitrail.core.html import Html, escape

_CELL = "text-align:left;padding:2px 14px 2px 0;vertical-align:top"
_QUIET = "opacity:.65;font-weight:400"


def card(title: str, rows: Sequence[tuple[str, object]], note: str = "") -> str:
    """Return the HTML of a title and a table of names and values."""
    head = f"<b>{escape(title)}</b>" + (f' <span style="{_QUIET}">{escape(note)}</span>' if note else "")
    body = "".join(
        f'<tr><th style="{_CELL};{_QUIET}">{escape(name)}</th><td style="{_CELL}">{escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<div>{head}<table style="margin:4px 0">{body}</table></div>'


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], more: int = 0) -> str:
    """Return the HTML of a table; `more` is the number of further rows, which are only counted."""
    head = "".join(f'<th style="{_CELL};{_QUIET}">{escape(name)}</th>' for name in headers)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    rest = f'<div style="{_QUIET}">and {more:,} more</div>' if more else ""
    return f'<table style="margin:4px 0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}'


def bar(share: float) -> Html:
    """Return the HTML of a bar and a number from 0 to 1."""
    percent = 100 * min(max(share, 0.0), 1.0)
    return Html(
        f'<span style="display:inline-block;width:90px;background:#8883;border-radius:2px"><span style="display:block;'
        f'width:{percent:.1f}%;height:9px;background:#0072b2;border-radius:2px"></span></span> {share:.3f}'
    )


def iframe(page: str, title: str, height: int = 760) -> str:
    """Return the HTML that embeds a page, with its own script and style, in a notebook."""
    return (
        f'<iframe srcdoc="{escape(page)}" title="{escape(title)}" sandbox="allow-scripts"'
        f' style="width:100%;height:{height}px;border:1px solid #8886;border-radius:4px"></iframe>'
    )
