"""Target torch: an ExportedProgram, which runs with torch alone."""

import contextlib
import io
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from vitrail.bundles.metadata import BundleInfo
from vitrail.core.errors import UsageError, first_line
from vitrail.inference.engine import Engine, EngineOutputs, ExportSource, Run
from vitrail.inference.graph import Exported, metadata, raise_interrupt
from vitrail.inference.targets.base import ExportOptions, Target
from vitrail.models.convolutions import bake_

MODEL = "model.pt2"


class TorchTarget(Target):
    """model.pt2. Reading such a file may run code of whoever wrote it, so vitrail reads only what it has just written,
    for the proof."""

    name = engine = "torch"
    precisions = ("float32",)
    packages = ("torch",)
    extra = "torch"
    imports = "import torch"
    program = (
        'model = torch.export.load("{model}").module()\n'
        "with torch.no_grad():\n"
        "    logits = model(torch.from_numpy(pixels))[0][0].numpy()"
    )
    notes = "Load a .pt2 file only if you trust its source: reading it may run code."

    @classmethod
    def write(cls, source: ExportSource, folder: Path, order: ExportOptions) -> Path:
        model = source.bundle.model
        bake_(model)
        size = (order.batch or 2, model.config.channels, *model.config.resolution)
        shapes = None if order.batch else {"pixel_values": {0: torch.export.Dim("batch")}}
        program = _trace(Exported(model).eval(), torch.zeros(size), shapes, model.config.family)
        texts = {f"{name}.txt": text for name, text in metadata(source).items()}
        content = io.BytesIO()  # torch ends the process if the disk is full
        torch.export.save(program, content, extra_files=texts)
        (folder / MODEL).write_bytes(content.getbuffer())
        return folder / MODEL

    @classmethod
    def opened(cls, model: Path, info: BundleInfo, precision: str) -> Engine:
        return _Program(model, info)


def _trace(model: Exported, images: torch.Tensor, shapes: Any, family: str) -> Any:
    """The program of a model. torch warns of an LSTM's flat weights, which the proof shows to be harmless."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # whatever the exporter meets
        raise_interrupt(error)
        raise UsageError(
            f"Target torch must have a model that can be exported, got family {family}, which torch.export cannot"
            f" ({first_line(error)})."
        ) from None


class _Program(Engine):
    """An ExportedProgram that this process has written."""

    name = "torch"
    precisions = ("float32",)
    packages = ("torch",)

    def __init__(self, path: Path, info: BundleInfo) -> None:
        with path.open("rb") as file:  # torch takes only paths in UTF-8
            self._program, self.info = torch.export.load(file).module(), info

    @classmethod
    def open(cls, bundle: Any, device: str | None = None, precision: str = "float32") -> Self:
        raise UsageError("Bundle must be run by engine torch, got a program that was exported.")

    @contextlib.contextmanager
    def running(self, threads: int | None, callers: int = 1) -> Generator[Run]:
        @torch.no_grad()
        def run(pixels_BHWC: np.ndarray) -> EngineOutputs:
            found = self._program(torch.from_numpy(self.info.preprocess.scale_array(pixels_BHWC)))
            return EngineOutputs(*(output.numpy() for output in found))

        yield run
