"""The kinds of sources in a network, by the prefix of their addresses."""

from typing import TYPE_CHECKING

from vitrail.extensions import Registry

if TYPE_CHECKING:
    from vitrail.weights.remote import Remote

REMOTES: "Registry[type[Remote]]" = Registry(
    "remote",
    {
        "hf": "vitrail.weights.hub:Hub",
        "https": "vitrail.weights.web:Web",
        "http": "vitrail.weights.web:Web",
    },
    base="vitrail.weights.remote:Remote",
)
"""By the word before the colon: `hf:owner/repository`, `https://...`. Another package adds one as `remote.NAME`."""


def remote_kind(source: str) -> str | None:
    """The kind of an address; None for a path."""
    kind, colon, _ = source.partition(":")
    return kind if colon and kind in REMOTES else None
