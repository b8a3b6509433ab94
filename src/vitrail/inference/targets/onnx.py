"""Target onnx: a file for ONNX Runtime and other runtimes that read ONNX."""

from pathlib import Path

from vitrail.bundles.metadata import BundleInfo
from vitrail.inference.engine import Engine, ExportSource
from vitrail.inference.graph import write_onnx
from vitrail.inference.onnx_engine import MODEL, OnnxEngine
from vitrail.inference.targets.base import ExportOptions, Target


class OnnxTarget(Target):
    """model.onnx, with preprocessing and labels in its metadata."""

    name = engine = "onnx"
    precisions = OnnxEngine.precisions
    packages = ("onnxruntime", "onnx")
    program_packages = ("onnxruntime",)
    extra = "onnx"
    imports = 'os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # no reports to its vendor\nimport onnxruntime'
    program = (
        'session = onnxruntime.InferenceSession("{model}", providers=["CPUExecutionProvider"])\n'
        'logits = session.run(["logits"], {{"pixel_values": pixels}})[0][0]'
    )

    @classmethod
    def write(cls, source: ExportSource, folder: Path, options: ExportOptions) -> Path:
        write_onnx(source, folder, options.precision, options.batch)
        return folder / MODEL

    @classmethod
    def opened(cls, model: Path, info: BundleInfo, precision: str) -> Engine:
        return OnnxEngine(model.parent, info, precision)
