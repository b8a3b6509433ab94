"""Export of a bundle to ONNX, and its verification.

The graph uses plain operators of opset 20 (matrix products and softmax), which every runtime supports. ONNX Runtime
applies its own fusions; its separate optimiser for transformers made DeiT-Ti/16 slower by a tenth on a CPU and is not
used.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitrail import __version__
from vitrail.console import say
from vitrail.data.sources import open_data
from vitrail.engines.base import Engine, Outputs, need
from vitrail.engines.cache import FORMAT, MODEL, PROOF
from vitrail.engines.eager import TorchEngine
from vitrail.engines.runtime import OnnxEngine
from vitrail.errors import UsageError, VitrailError, first_line
from vitrail.images.preprocess import Preprocess
from vitrail.models.base import AnyModel, Seen
from vitrail.models.convolutions import bake_
from vitrail.storage import atomic_folder, write_json
from vitrail.weights.bundle import Bundle, load

OPSET = 20
TOLERANCE = 1e-4  # of the largest logit: rounding in another order, and nothing else
_ONE_FILE = 1_900_000_000  # bytes of weights: a protocol buffer ends at 2 GiB
_PROOF_MACS = 10**11


class _Exported(nn.Module):
    """A module that returns logits and features."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        seen = Seen(frozenset())
        logits = self.model(pixel_values, seen)
        return logits, seen.steps["pooled"]


def export(path: Path, target: Path, key: str) -> None:
    """Write the folder `target` for the bundle at `path`, whose fingerprint is `key`; an earlier export is replaced."""
    runtime, onnx = need("onnxruntime", "onnx"), need("onnx", "onnx")
    need("onnxscript", "onnx")
    say(f"making {target} (once for this bundle)")
    bundle = load(path)
    bundle.parts.check_computable()
    parts, model = bundle.parts, bundle.model.float().eval()
    pixels = sample(parts.preprocess, min(max(_PROOF_MACS // parts.config.macs, 8), 40))
    expected = _answer(TorchEngine(bundle), pixels)
    bake_(model)
    program = _translate(model)
    program.model.metadata_props.update(_metadata(bundle, key))
    with atomic_folder(target, force=True) as folder:
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        program.save(str(folder / MODEL), external_data=size > _ONE_FILE)
        files = sorted(file.name for file in folder.iterdir())
        proof = prove(_answer(OnnxEngine(folder, parts), pixels), expected)
        versions = {"vitrail": __version__, "torch": torch.__version__} | {
            package.__name__: package.__version__ for package in (onnx, runtime)
        }
        write_json(
            folder / PROOF,
            {"format": FORMAT, "bundle": key, "files": files, "opset": OPSET, "versions": versions, **proof},
        )
    say(
        f"checked on {proof['pictures']} images: the same answers as torch, largest logit difference"
        f" {proof['max_logit_difference']:.1e}"
    )


def _translate(model: AnyModel) -> Any:
    """The model as an ONNX program."""
    config = model.config
    example = torch.zeros(2, config.channels, *config.resolution, device=next(model.parameters()).device)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                _Exported(model).eval(),
                (example,),
                input_names=["pixel_values"],
                output_names=["logits", "features"],
                dynamic_shapes={"pixel_values": {0: torch.export.Dim("batch")}},
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # whatever the exporter meets
        raise UsageError(
            f"Engine onnx must have a model that can be exported, got family {config.family}, which torch.onnx cannot"
            f" ({first_line(error)}). Use engine torch."
        ) from None
    _prevent_padding_fusion(program.model.graph)
    _strip(program.model.graph)
    return program


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
    make_node = need("onnx_ir", "onnx").node
    for pool in list(graph):
        rim = pool.inputs[0] if pool.op_type == "MaxPool" else None
        if rim is not None and rim.producer() is not None and rim.producer().op_type == "Pad":
            between = make_node("Max", inputs=[rim])
            graph.insert_before(pool, between)
            pool.replace_input_with(0, between.outputs[0])


def _metadata(bundle: Bundle, key: str) -> dict[str, str]:
    """Metadata for users of the file alone: preprocessing and labels."""
    settings = bundle.preprocess.to_json()
    return {
        "name": bundle.model.config.name or bundle.model.config.family,
        "labels": json.dumps(bundle.labels, ensure_ascii=False),
        "mean": json.dumps(settings["mean"]),
        "std": json.dumps(settings["std"]),
        "preprocess": json.dumps(settings),
        "licence": str(bundle.provenance.get("licence", "unknown")),
        "bundle": key,
    }


def prove(found: Outputs, expected: Outputs) -> dict[str, Any]:
    """The largest difference of an engine's outputs from torch's. Raises unless it is within rounding and all
    predictions are the same."""
    count = len(expected.logits)
    gap = float(np.abs(found.logits - expected.logits).max())
    alike = int((found.logits.argmax(1) == expected.logits.argmax(1)).sum())
    if not gap <= TOLERANCE * max(float(np.abs(expected.logits).max()), 1.0) or alike < count:
        raise VitrailError(
            f"The exported model predicts {count - alike} of {count} images differently from torch, with logits up to"
            f" {gap:.1e} apart. It is not kept; use engine torch."
        )
    return {
        "pictures": count,
        "same_answers": alike,
        "max_logit_difference": gap,
        "max_feature_difference": float(np.abs(found.features - expected.features).max()),
    }


def sample(preprocess: Preprocess, count: int) -> np.ndarray:
    """Up to 40 embedded images, cropped for the model; for other numbers of channels than 1 and 3, grey is repeated."""
    images = open_data("fashion-40").first.images[:count]
    bands = preprocess.channels if preprocess.channels not in (1, 3) else 1
    return np.stack([preprocess.crop(np.repeat(image, bands, axis=2)) for image in np.asarray(images)])


def _answer(engine: Engine, pixels: np.ndarray) -> Outputs:
    """Outputs for all images: a batch of one, then batches of eight."""
    with engine.running(None) as run:
        parts = [run(piece) for piece in _pieces(pixels)]
    return Outputs(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _pieces(pixels: np.ndarray) -> Iterator[np.ndarray]:
    yield pixels[:1]
    for at in range(1, len(pixels), 8):
        yield pixels[at : at + 8]
