"""Target openvino: OpenVINO's intermediate representation."""

import json
from pathlib import Path

from vitrail.bundles.metadata import BundleInfo
from vitrail.inference.engine import Engine, ExportSource
from vitrail.inference.openvino_engine import HINTS, MODEL, OpenvinoEngine, write_openvino
from vitrail.inference.targets.base import ExportOptions, Target


class OpenvinoTarget(Target):
    """model.xml and model.bin, with preprocessing and labels in their metadata (rt_info)."""

    name = engine = "openvino"
    precisions = ("float32", "int8")
    packages = ("openvino", "onnx")
    program_packages = ("openvino",)
    extra = "openvino"
    imports = 'sys.modules["openvino_telemetry"] = None  # no reports to its vendor\nimport openvino'
    program = (
        "# Without a hint, OpenVINO computes in bfloat16 if the CPU has it.\n"
        'model = openvino.Core().compile_model("{model}", "CPU", {settings})\n'
        'logits = model({{"pixel_values": pixels}})["logits"][0]'
    )

    @classmethod
    def program_for(cls, model: str, precision: str) -> str:
        return cls.program.format(model=model, settings=json.dumps(HINTS[precision]))

    @classmethod
    def write(cls, source: ExportSource, folder: Path, options: ExportOptions) -> Path:
        write_openvino(source, folder, options.precision, options.batch)
        return folder / MODEL

    @classmethod
    def opened(cls, model: Path, info: BundleInfo, precision: str) -> Engine:
        return OpenvinoEngine(model.parent, info, precision)
