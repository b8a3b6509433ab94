"""Escaping of text for HTML. Every untrusted text goes through `escape`."""

import html


class Html(str):
    """Trusted markup, which `escape` does not change."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Escape text for HTML."""
    return text if isinstance(text, Html) else Html(html.escape(str(text), quote=True))
