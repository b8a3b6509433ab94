"""The registry of remote sources, by the prefix of their addresses."""

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
"""Remote sources by prefix: `hf:owner/repository`, `https://...`. Another package adds one as `remote.NAME`."""


def remote_prefix(source: str) -> str | None:
    """Return the registered prefix of an address, such as `hf`. Return None for a path."""
    prefix, colon, _ = source.partition(":")
    return prefix if colon and prefix in REMOTES else None
