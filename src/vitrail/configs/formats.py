"""The weight formats by name, in the order in which they are tried when reading."""

from typing import TYPE_CHECKING

from vitrail.errors import UsageError, did_you_mean
from vitrail.extensions import Registry

if TYPE_CHECKING:
    from vitrail.weights.vocabulary import Vocabulary

FORMATS: "Registry[type[Vocabulary]]" = Registry(
    "format",
    {
        "huggingface": "vitrail.weights.huggingface:HuggingFace",
        "torchvision": "vitrail.weights.torchvision:Torchvision",
        "dino": "vitrail.weights.dino:Dino",
        "google": "vitrail.weights.google:Google",
        "timm": "vitrail.weights.timm:Timm",
    },
    base="vitrail.weights.vocabulary:Vocabulary",
)
"""Formats of other libraries. Another package adds one as `format.NAME`; it is tried after the built-in ones."""

_READ_ONLY = ("dino",)  # named here because `--help` must not import the classes; a test holds both equal


def written_formats() -> list[str]:
    """Names of the formats that `convert` can write: vitrail's own and those of other libraries."""
    return ["vitrail", *(name for name in FORMATS if name not in _READ_ONLY)]


def check_written_format(name: str) -> None:
    """Refuse a format that `convert` cannot write."""
    known = written_formats()
    if name not in known:
        raise UsageError(f"Format must be one of {', '.join(known)}, got {name!r}.{did_you_mean(name, known)}")
