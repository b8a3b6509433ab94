"""Escape text for HTML pages. All untrusted text is passed through `escape`."""

import html


class Html(str):
    """Trusted markup, which `escape` returns unchanged."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Return text escaped for HTML, including quotes."""
    return text if isinstance(text, Html) else Html(html.escape(str(text), quote=True))
