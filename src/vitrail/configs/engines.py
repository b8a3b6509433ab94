"""The engines that run a model, the precisions they compute in, and the targets of `vitrail export`, by name."""

from typing import TYPE_CHECKING

from vitrail.extensions import Registry

if TYPE_CHECKING:
    from vitrail.engines.base import Engine
    from vitrail.engines.targets.base import Target

ENGINES: "Registry[type[Engine]]" = Registry(
    "engine",
    {
        "torch": "vitrail.engines.eager:TorchEngine",
        "onnx": "vitrail.engines.runtime:OnnxEngine",
        "openvino": "vitrail.engines.openvino:OpenvinoEngine",
    },
    base="vitrail.engines.base:Engine",
    stated="name",
)
"""The first one is always available, and the others are verified against it."""

PRECISIONS = ("float32", "bfloat16", "int8")
"""The first one is exact: it is the default, and the others are compared with it."""

TARGETS: "Registry[type[Target]]" = Registry(
    "target",
    {
        "onnx": "vitrail.engines.targets.onnx:OnnxTarget",
        "openvino": "vitrail.engines.targets.openvino:OpenvinoTarget",
        "torch": "vitrail.engines.targets.torch:TorchTarget",
        "triton": "vitrail.engines.targets.triton:TritonTarget",
    },
    base="vitrail.engines.targets.base:Target",
    stated="name",
)
