"""Export of a bundle to ONNX.

The graph uses plain operators of opset 20 (matrix products and softmax), which every runtime supports. ONNX Runtime
applies its own fusions; its separate optimiser for transformers made DeiT-Ti/16 slower by a tenth on a CPU and is not
used.
"""

import json
import logging
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core.errors import UsageError, first_line
from vitrail.inference.engine import ExportSource, import_engine_package
from vitrail.inference.model_files import kept
from vitrail.inference.onnx_engine import MODEL, OnnxEngine
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel
from vitrail.models.convolutions import bake_
from vitrail.models.layers import separate_

OPSET = 20
_ONE_FILE = 1_900_000_000  # bytes of weights: a protocol buffer ends at 2 GiB


class Exported(nn.Module):
    """A module that returns logits and features."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Both outputs for normalised images (B, C, H, W)."""
        activations = Activations(frozenset())
        logits = self.model(pixel_values, activations)
        return logits, activations.steps["pooled"]


def write_onnx(source: ExportSource, folder: Path, precision: str = "float32", batch: int | None = None) -> None:
    """Write model.onnx, of a large model with its weights in model.onnx.data; a `batch` fixes its size."""
    if precision == "int8":
        from vitrail.inference.quantise import quantise

        with tempfile.TemporaryDirectory(dir=folder) as aside:  # on the disk that must have room for it anyway
            quantise(find_graph(source, Path(aside)), folder / MODEL, is_large=_is_large(source))
    else:
        path = find_graph(source, folder)
        if path.parent != folder:
            for file in path.parent.glob(f"{MODEL}*"):
                shutil.copyfile(file, folder / file.name)
    if batch is not None:
        _fix_batch(folder / MODEL, batch)


def find_graph(source: ExportSource, folder: Path) -> Path:
    """The bundle's ONNX file in float32: the one that is kept for its engine, otherwise a new one in the folder."""
    if (place := kept(source.path, source.key, OnnxEngine, "float32")) is not None:
        return place / MODEL
    for package in ("onnx", "onnxscript"):
        import_engine_package(package, "onnx")
    bake_(source.bundle.model)
    separate_(source.bundle.model)
    program = _translate(source.bundle.model)
    program.model.metadata_props.update(metadata(source))
    program.save(str(folder / MODEL), external_data=_is_large(source))
    return folder / MODEL


def _is_large(source: ExportSource) -> bool:
    weights = source.bundle.model.state_dict().values()
    return sum(tensor.numel() * tensor.element_size() for tensor in weights) > _ONE_FILE


def _fix_batch(path: Path, batch: int) -> None:
    onnx = import_engine_package("onnx", "onnx")
    model = onnx.load(path, load_external_data=False)
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(model, path)


def _translate(model: AnyModel) -> Any:
    """The model as an ONNX program."""
    config = model.config
    example = torch.zeros(2, config.channels, *config.resolution, device=next(model.parameters()).device)
    for talker in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(talker).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                Exported(model).eval(),
                (example,),
                input_names=["pixel_values"],
                output_names=["logits", "features"],
                dynamic_shapes={"pixel_values": {0: torch.export.Dim("batch")}},
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # whatever the exporter meets
        raise_interrupt(error)
        raise UsageError(
            f"Engine onnx must have a model that can be exported, got family {config.family}, which torch.onnx cannot"
            f" ({first_line(error)}). Use engine torch."
        ) from None
    _prevent_padding_fusion(program.model.graph)
    _strip(program.model.graph)
    return program


def raise_interrupt(error: BaseException) -> None:
    """Raise KeyboardInterrupt if that is what an error comes from: torch's exporters report it as their own failure."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        cause = cause.__cause__ or cause.__context__


def _strip(graph: Any) -> None:
    """Remove the stored shapes of weights and intermediate values: every runtime infers them, and tools that change the
    graph fail on stored ones (ONNX Runtime's quantiser transposes weights). Also remove the exporter's notes, which
    contain paths of this machine."""
    made = {value for node in graph for value in node.outputs} | set(graph.initializers.values())
    for value in made - set(graph.outputs):
        value.shape = value.type = None
    for noted in (*graph, *graph.inputs, *made):
        noted.metadata_props.clear()


def _prevent_padding_fusion(graph: Any) -> None:
    """ONNX Runtime (1.31) fuses zero padding into a following max pooling, which then ignores the border instead of
    using zeros: logits of BiT were off by 0.01. A Max operator with one input between the two prevents the fusion."""
    make_node = import_engine_package("onnx_ir", "onnx").node
    for pool in list(graph):
        rim = pool.inputs[0] if pool.op_type == "MaxPool" else None
        if rim is not None and rim.producer() is not None and rim.producer().op_type == "Pad":
            between = make_node("Max", inputs=[rim])
            graph.insert_before(pool, between)
            pool.replace_input_with(0, between.outputs[0])


def metadata(source: ExportSource) -> dict[str, str]:
    """Metadata for users of the file alone: preprocessing and labels."""
    bundle, settings = source.bundle, source.bundle.preprocess.to_json()
    return {
        "name": bundle.model.config.name or bundle.model.config.family,
        "labels": json.dumps(bundle.labels, ensure_ascii=False),
        "mean": json.dumps(settings["mean"]),
        "std": json.dumps(settings["std"]),
        "preprocess": json.dumps(settings),
        "licence": str(bundle.provenance.get("licence", "unknown")),
        "bundle": source.key,
    }
