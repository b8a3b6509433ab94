"""The engines by name. What an engine is, `engines.base` says."""

from typing import TYPE_CHECKING

from vitrail.extensions import Registry

if TYPE_CHECKING:
    from vitrail.engines.base import Engine

ENGINES: "Registry[type[Engine]]" = Registry(
    "engine", {"torch": "vitrail.engines.eager:TorchEngine", "onnx": "vitrail.engines.runtime:OnnxEngine"}
)
"""The first one is always there, and the others are proved against it."""
