"""The registry of weight formats, in the order in which they are tried when reading."""

from typing import TYPE_CHECKING

from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.bundles.formats.base import WeightFormat

FORMATS: "Registry[type[WeightFormat]]" = Registry(
    "format",
    {
        "huggingface": "vitrail.bundles.formats.huggingface:HuggingFace",
        "clip": "vitrail.bundles.formats.clip:Clip",
        "torchvision": "vitrail.bundles.formats.torchvision:Torchvision",
        "dino": "vitrail.bundles.formats.dino:Dino",
        "google": "vitrail.bundles.formats.google:Google",
        "timm": "vitrail.bundles.formats.timm:Timm",
    },
    base="vitrail.bundles.formats.base:WeightFormat",
)
"""Formats of other libraries. Another package adds one as `format.NAME`; it is tried after the built-in ones."""

_READ_ONLY = ("clip", "dino")  # listed here because `--help` must not import the classes; a test compares both


def written_formats() -> list[str]:
    """Return the formats that `convert` can write: vitrail's own and those of other libraries."""
    return ["vitrail", *(name for name in FORMATS if name not in _READ_ONLY)]


def check_written_format(name: str) -> None:
    """Raise UsageError for a format that `convert` cannot write."""
    formats = written_formats()
    if name not in formats:
        raise UsageError(f"Format must be one of {', '.join(formats)}, got {name!r}.{did_you_mean(name, formats)}")
