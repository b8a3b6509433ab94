"""The engines by name; their interface is `engines.base.Engine`."""

from typing import TYPE_CHECKING

from vitrail.extensions import Registry

if TYPE_CHECKING:
    from vitrail.engines.base import Engine

ENGINES: "Registry[type[Engine]]" = Registry(
    "engine",
    {"torch": "vitrail.engines.eager:TorchEngine", "onnx": "vitrail.engines.runtime:OnnxEngine"},
    base="vitrail.engines.base:Engine",
)
"""The first one is always available, and the others are verified against it."""
