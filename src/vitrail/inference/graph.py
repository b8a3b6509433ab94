"""Export of a bundle's model to ONNX.

The graph uses plain operators of opset 20 (matrix products and softmax), which every runtime supports. ONNX Runtime
applies its own fusions. Its separate optimiser for transformers is not used: it made DeiT-Ti/16 10 % slower on a CPU.
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
from vitrail.inference.model_files import find_model_file
from vitrail.inference.onnx_engine import MODEL, OnnxEngine
from vitrail.models.activations import Activations
from vitrail.models.base import AnyModel
from vitrail.models.convolutions import bake_
from vitrail.models.layers import separate_

OPSET = 20
_MAX_BYTES = 1_900_000_000  # weights in model.onnx: a protocol buffer is limited to 2 GiB


class ExportModule(nn.Module):
    """A wrapper of a model that returns logits and features, the outputs of every exported file."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, K) and features (B, D) of normalised images (B, C, H, W)."""
        activations = Activations(frozenset())
        logits = self.model(pixel_values, activations)
        return logits, activations.steps["pooled"]


def write_onnx(source: ExportSource, folder: Path, precision: str = "float32", batch: int | None = None) -> None:
    """Write model.onnx to a folder. A `batch` fixes the batch size.

    The weights of a model above 1.9 GB are written to model.onnx.data.
    """
    if precision == "int8":
        from vitrail.inference.quantise import quantise

        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # on the disk of the output, which needs the space too
            quantise(find_graph(source, Path(scratch)), folder / MODEL, is_large=_is_large(source))
    else:
        path = find_graph(source, folder)
        if path.parent != folder:
            for file in path.parent.glob(f"{MODEL}*"):
                shutil.copyfile(file, folder / file.name)
    if batch is not None:
        _fix_batch(folder / MODEL, batch)


def find_graph(source: ExportSource, folder: Path) -> Path:
    """Return the path of the bundle's ONNX file in float32.

    It is the model file of engine onnx if that exists. Otherwise, write a new one into the folder.
    """
    if (model_folder := find_model_file(source.path, source.key, OnnxEngine, "float32")) is not None:
        return model_folder / MODEL
    for package in ("onnx", "onnxscript"):
        import_engine_package(package, "onnx")
    bake_(source.bundle.model)
    separate_(source.bundle.model)
    program = _export_program(source.bundle.model)
    program.model.metadata_props.update(metadata(source))
    program.save(str(folder / MODEL), external_data=_is_large(source))
    return folder / MODEL


def _is_large(source: ExportSource) -> bool:
    weights = source.bundle.model.state_dict().values()
    return sum(tensor.numel() * tensor.element_size() for tensor in weights) > _MAX_BYTES


def _fix_batch(path: Path, batch: int) -> None:
    """Replace the free batch dimension of all inputs and outputs in an ONNX file by a fixed size."""
    onnx = import_engine_package("onnx", "onnx")
    model = onnx.load(path, load_external_data=False)
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(model, path)


def _export_program(model: AnyModel) -> Any:
    """Export a model to an ONNX program. Raises UsageError if torch.onnx cannot export it."""
    config = model.config
    example = torch.zeros(2, config.channels, *config.resolution, device=next(model.parameters()).device)
    for package in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(package).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                ExportModule(model).eval(),
                (example,),
                input_names=["pixel_values"],
                output_names=["logits", "features"],
                dynamic_shapes={"pixel_values": {0: torch.export.Dim("batch")}},
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # the exporter raises many classes
        raise_interrupt(error)
        raise UsageError(
            f"Engine onnx must have a model that can be exported, got family {config.family}, which torch.onnx cannot"
            f" ({first_line(error)}). Use engine torch."
        ) from None
    _prevent_padding_fusion(program.model.graph)
    _strip_metadata(program.model.graph)
    return program


def raise_interrupt(error: BaseException) -> None:
    """Raise KeyboardInterrupt if it caused an error: torch's exporters report an interrupt as their own failure."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        cause = cause.__cause__ or cause.__context__


def _strip_metadata(graph: Any) -> None:
    """Remove stored shapes and the exporter's metadata from an ONNX graph, in place.

    Every runtime infers the shapes of weights and intermediate values. Tools that change the graph fail on stored
    shapes (ONNX Runtime's quantiser transposes weights). The exporter's metadata contain paths of this machine.
    """
    values = {value for node in graph for value in node.outputs} | set(graph.initializers.values())
    for value in values - set(graph.outputs):
        value.shape = value.type = None
    for item in (*graph, *graph.inputs, *values):
        item.metadata_props.clear()


def _prevent_padding_fusion(graph: Any) -> None:
    """Insert a Max operator with one input between each zero padding and a following max pooling, in place.

    ONNX Runtime (1.31) fuses the two, and the pooling then ignores the border instead of using zeros. Logits of BiT
    were wrong by 0.01.
    """
    make_node = import_engine_package("onnx_ir", "onnx").node
    for pool in list(graph):
        padded = pool.inputs[0] if pool.op_type == "MaxPool" else None
        if padded is not None and padded.producer() is not None and padded.producer().op_type == "Pad":
            barrier = make_node("Max", inputs=[padded])
            graph.insert_before(pool, barrier)
            pool.replace_input_with(0, barrier.outputs[0])


def metadata(source: ExportSource) -> dict[str, str]:
    """Return the metadata that an exported file stores: name, labels, preprocessing, licence and fingerprint."""
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
