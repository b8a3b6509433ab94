"""Target triton: a model repository of the Triton Inference Server."""

import re
from pathlib import Path

from vitrail.inference.engine import ExportSource, import_engine_package
from vitrail.inference.graph import write_onnx
from vitrail.inference.onnx_engine import MODEL
from vitrail.inference.targets.base import LABELS, ExportOptions, write_labels
from vitrail.inference.targets.onnx import OnnxTarget

_MAX_BATCH = 64


class TritonTarget(OnnxTarget):
    """NAME/config.pbtxt, NAME/labels.txt and NAME/1/model.onnx, which the server's ONNX Runtime backend runs."""

    name = "triton"
    notes = (
        "This folder is a model repository: `tritonserver --model-repository=THIS_FOLDER`. Clients send `pixel_values`"
        " as above and, if the batch size is not fixed, may ask for the best classes by name."
    )

    @classmethod
    def write(cls, source: ExportSource, folder: Path, options: ExportOptions) -> Path:
        config = source.bundle.model.config
        name = re.sub(r"[^A-Za-z0-9]+", "-", config.name or config.family).strip("-").lower() or config.family
        version_folder = folder / name / "1"
        version_folder.mkdir(parents=True)
        write_onnx(source, version_folder, options.precision, options.batch)
        if config.classes:
            write_labels(folder / name / LABELS, source.bundle.info)
        has_labels = config.classes > 0 and not options.batch
        text = _format_config(name, version_folder / MODEL, options.batch, has_labels=has_labels)
        (folder / name / "config.pbtxt").write_text(text, encoding="utf-8")
        return version_folder / MODEL


def _format_config(name: str, path: Path, batch: int | None, *, has_labels: bool) -> str:
    """Return the content of config.pbtxt. Without a fixed `batch`, the batch dimension is not listed."""
    graph = import_engine_package("onnx", "onnx").load(path, load_external_data=False).graph
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {0 if batch else _MAX_BATCH}"]
    for side, ports in (("input", graph.input), ("output", graph.output)):
        for port in ports:
            sizes = [dim.dim_value for dim in port.type.tensor_type.shape.dim][0 if batch else 1 :]
            labels = f' label_filename: "{LABELS}"' if port.name == "logits" and has_labels else ""
            lines.append(
                f'{side} {{ name: "{port.name}" data_type: TYPE_FP32 dims: [ {", ".join(map(str, sizes))} ]{labels} }}'
            )
    if not batch:
        lines.append("dynamic_batching { }")
    return "\n".join(lines) + "\n"
