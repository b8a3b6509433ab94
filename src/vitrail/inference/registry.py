"""Registries of the engines that run a model and of the targets of `vitrail export`, and the list of precisions."""

from typing import TYPE_CHECKING

from vitrail.core.registry import Registry

if TYPE_CHECKING:
    from vitrail.inference.engine import Engine
    from vitrail.inference.targets.base import Target

ENGINES: "Registry[type[Engine]]" = Registry(
    "engine",
    {
        "torch": "vitrail.inference.torch_engine:TorchEngine",
        "onnx": "vitrail.inference.onnx_engine:OnnxEngine",
        "openvino": "vitrail.inference.openvino_engine:OpenvinoEngine",
    },
    base="vitrail.inference.engine:Engine",
    name_attribute="name",
)
"""Engines by name. The first one is always installed, and the others are verified against it."""

PRECISIONS = ("float32", "bfloat16", "int8")
"""Precisions of all engines. The first one is exact and the default; the others are compared with it."""

TARGETS: "Registry[type[Target]]" = Registry(
    "target",
    {
        "onnx": "vitrail.inference.targets.onnx:OnnxTarget",
        "openvino": "vitrail.inference.targets.openvino:OpenvinoTarget",
        "torch": "vitrail.inference.targets.torch:TorchTarget",
        "triton": "vitrail.inference.targets.triton:TritonTarget",
    },
    base="vitrail.inference.targets.base:Target",
    name_attribute="name",
)
"""Targets of `vitrail export` by name."""
