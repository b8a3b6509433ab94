"""An export target: the ORT format, which builds of ONNX Runtime for phones read."""

import tempfile
from pathlib import Path

import onnxruntime

from vitrail.inference.graph import write_onnx
from vitrail.inference.onnx_engine import OnnxEngine
from vitrail.inference.targets.onnx import OnnxTarget


class OrtEngine(OnnxEngine):
    file = "model.ort"


class Ort(OnnxTarget):
    """model.ort, optimised when it is written."""

    name = "ort"
    precisions = ("float32",)

    @classmethod
    def write(cls, source, folder, options):
        session_options = onnxruntime.SessionOptions()
        session_options.optimized_model_filepath = str(folder / OrtEngine.file)
        session_options.add_session_config_entry("session.save_model_format", "ORT")
        session_options.log_severity_level = 3
        with tempfile.TemporaryDirectory() as graph:
            write_onnx(source, Path(graph), options.precision, options.batch)
            path = Path(graph) / OnnxEngine.file
            onnxruntime.InferenceSession(path, session_options, providers=["CPUExecutionProvider"])
        return folder / OrtEngine.file

    @classmethod
    def opened(cls, model, parts, precision):
        return OrtEngine(model.parent, parts, precision)
