"""The kinds of sources in a network, by the prefix of their addresses."""

from typing import TYPE_CHECKING

from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.bundles.remote.base import Remote

REMOTES: "Registry[type[Remote]]" = Registry(
    "remote",
    {
        "hf": "vitrail.bundles.remote.hub:Hub",
        "https": "vitrail.bundles.remote.web:Web",
        "http": "vitrail.bundles.remote.web:Web",
    },
    base="vitrail.bundles.remote.base:Remote",
)
"""By the word before the colon: `hf:owner/repository`, `https://...`. Another package adds one as `remote.NAME`."""


def remote_kind(source: str) -> str | None:
    """The kind of an address; None for a path."""
    kind, colon, _ = source.partition(":")
    return kind if colon and kind in REMOTES else None
