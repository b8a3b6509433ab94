"""Target openvino: OpenVINO's intermediate representation, with weights in float32."""

from pathlib import Path

from vitrail.engines.base import Engine, Source
from vitrail.engines.openvino import MODEL, OpenvinoEngine, write_openvino
from vitrail.engines.targets.base import Order, Target
from vitrail.weights.parts import Parts


class OpenvinoTarget(Target):
    """model.xml and model.bin, with preprocessing and labels in their metadata (rt_info)."""

    name = engine = "openvino"
    precisions = ("float32",)
    packages = ("openvino", "onnx")
    extra = "openvino"
    imports = 'sys.modules["openvino_telemetry"] = None  # it would report to its maker\nimport openvino'
    program = (
        "# Without the hint, OpenVINO computes in bfloat16 where the CPU can.\n"
        'model = openvino.Core().compile_model("{model}", "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})\n'
        'logits = model({{"pixel_values": pixels}})["logits"][0]'
    )

    @classmethod
    def write(cls, source: Source, folder: Path, order: Order) -> Path:
        write_openvino(source, folder, order.batch)
        return folder / MODEL

    @classmethod
    def opened(cls, model: Path, parts: Parts, precision: str) -> Engine:
        return OpenvinoEngine(model.parent, parts, precision)
