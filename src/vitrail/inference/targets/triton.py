"""Target triton: a model repository of the Triton Inference Server."""

import re
from pathlib import Path

from vitrail.inference.engine import ExportSource, import_engine_package
from vitrail.inference.graph import write_onnx
from vitrail.inference.onnx_engine import MODEL
from vitrail.inference.targets.base import LABELS, ExportOptions, write_labels
from vitrail.inference.targets.onnx import OnnxTarget

_LARGEST_BATCH = 64


class TritonTarget(OnnxTarget):
    """NAME/config.pbtxt, NAME/labels.txt and NAME/1/model.onnx, which the server's ONNX Runtime backend runs."""

    name = "triton"
    notes = (
        "This folder is a model repository: `tritonserver --model-repository=THIS_FOLDER`. Clients send `pixel_values`"
        " as above and, where any number of images is taken, may ask for the best classes by name."
    )

    @classmethod
    def write(cls, source: ExportSource, folder: Path, order: ExportOptions) -> Path:
        config = source.bundle.model.config
        name = re.sub(r"[^A-Za-z0-9]+", "-", config.name or config.family).strip("-").lower() or config.family
        place = folder / name / "1"
        place.mkdir(parents=True)
        write_onnx(source, place, order.precision, order.batch)
        if config.classes:
            write_labels(folder / name / LABELS, source.bundle.info)
        settings = _settings(name, place / MODEL, order.batch, has_labels=config.classes > 0 and not order.batch)
        (folder / name / "config.pbtxt").write_text(settings, encoding="utf-8")
        return place / MODEL


def _settings(name: str, path: Path, batch: int | None, *, has_labels: bool) -> str:
    """The content of config.pbtxt. Where any batch is taken, its dimension is not listed."""
    graph = import_engine_package("onnx", "onnx").load(path, load_external_data=False).graph
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {0 if batch else _LARGEST_BATCH}"]
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
