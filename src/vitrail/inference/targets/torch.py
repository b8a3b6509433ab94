"""Target torch: an ExportedProgram, which runs with torch only."""

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
from vitrail.inference.graph import ExportModule, metadata, raise_interrupt
from vitrail.inference.targets.base import ExportOptions, Target
from vitrail.models.convolutions import bake_

MODEL = "model.pt2"


class TorchTarget(Target):
    """model.pt2. Reading such a file may run code of its author, so vitrail reads only the file that it has just
    written, to verify it."""

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
    def write(cls, source: ExportSource, folder: Path, options: ExportOptions) -> Path:
        model = source.bundle.model
        bake_(model)
        size = (options.batch or 2, model.config.channels, *model.config.resolution)
        shapes = None if options.batch else {"pixel_values": {0: torch.export.Dim("batch")}}
        program = _trace(ExportModule(model).eval(), torch.zeros(size), shapes, model.config.family)
        texts = {f"{name}.txt": text for name, text in metadata(source).items()}
        content = io.BytesIO()  # torch.export.save to a file aborts the process if the disk is full
        torch.export.save(program, content, extra_files=texts)
        (folder / MODEL).write_bytes(content.getbuffer())
        return folder / MODEL

    @classmethod
    def opened(cls, model: Path, info: BundleInfo, precision: str) -> Engine:
        return _ExportedProgramEngine(model, info)


def _trace(model: ExportModule, images: torch.Tensor, shapes: Any, family: str) -> Any:
    """Export a model to an ExportedProgram. Raises UsageError if torch.export cannot export it.

    torch warns about the flat weights of an LSTM. The proof shows that the warning can be ignored.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, (images,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # the exporter raises many classes
        raise_interrupt(error)
        raise UsageError(
            f"Target torch must have a model that can be exported, got family {family}, which torch.export cannot"
            f" ({first_line(error)})."
        ) from None


class _ExportedProgramEngine(Engine):
    """An engine for an ExportedProgram that this process has written. It cannot open other files."""

    name = "torch"
    precisions = ("float32",)
    packages = ("torch",)

    def __init__(self, path: Path, info: BundleInfo) -> None:
        with path.open("rb") as file:  # torch takes only paths in UTF-8
            self._program, self.info = torch.export.load(file).module(), info

    @classmethod
    def open(cls, bundle: Any, device: str | None = None, precision: str = "float32") -> Self:
        raise UsageError("Bundle must be run by engine torch, got an exported program.")

    @contextlib.contextmanager
    def running(self, threads: int | None, callers: int = 1) -> Generator[Run]:
        @torch.no_grad()
        def run(pixels_BHWC: np.ndarray) -> EngineOutputs:
            outputs = self._program(torch.from_numpy(self.info.preprocess.scale_array(pixels_BHWC)))
            return EngineOutputs(*(output.numpy() for output in outputs))

        yield run
