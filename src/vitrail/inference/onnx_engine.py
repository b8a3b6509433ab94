"""The ONNX Runtime engine, which runs an ONNX file without torch."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vitrail.bundles.metadata import BundleInfo
from vitrail.core.errors import CorruptFileError, first_line
from vitrail.inference.engine import (
    FIRST_USE,
    EngineChoice,
    EngineOutputs,
    ExportSource,
    FileEngine,
    Run,
    batch_for,
    first_call_alone,
    import_engine_package,
    thread_count,
)
from vitrail.models.config import ModelConfig

MODEL = "model.onnx"
# In int8, models from this size on compute one image at a time, so that images do not share scales. This takes 5 %
# longer for DeiT-Ti/16 (1.3e9) and would take 36 % longer for the embedded model (1.2e7).
_SINGLE_IMAGE_MACS = 10**9


class OnnxEngine(FileEngine):
    """An ONNX model file in ONNX Runtime, with the metadata of its bundle."""

    name = "onnx"
    precisions = ("float32", "int8")
    packages = ("onnxruntime",)
    folder_suffixes = {"float32": "onnx", "int8": "onnx-int8"}  # noqa: RUF012 - a constant
    file: ClassVar[str] = MODEL
    """Name of the model file in its folder."""

    def __init__(self, folder: Path, info: BundleInfo, precision: str = "float32") -> None:
        super().__init__(folder, info, precision)
        # Keyed by process and number of threads: a fork inherits sessions without their threads.
        self._sessions: dict[tuple[int, int], Any] = {}

    @classmethod
    def depends_on_batch(cls, config: ModelConfig, precision: str) -> bool:
        return precision == "int8" and config.macs < _SINGLE_IMAGE_MACS

    @classmethod
    def write(cls, source: ExportSource, folder: Path, precision: str) -> None:
        from vitrail.inference.graph import write_onnx

        write_onnx(source, folder, precision)

    @contextlib.contextmanager
    def running(self, threads: int | None, callers: int = 1) -> Generator[Run]:
        session = self._get_session(thread_count(threads))
        # In int8, the images of a call share scales. Small models always get batches of the size that `predict` uses.
        config, call_size = self.info.config, None
        if self.precision == "int8":
            call_size = batch_for(config) if self.depends_on_batch(config, "int8") else 1

        def run(pixels_BHWC: np.ndarray) -> EngineOutputs:
            images = self.info.preprocess.scale_array(pixels_BHWC)
            step = call_size or len(images)
            with self.one_line_errors():
                outputs = [
                    session.run(["logits", "features"], {"pixel_values": images[start : start + step]})
                    for start in range(0, len(images), step)
                ]
            return EngineOutputs(
                *(arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for arrays in zip(*outputs, strict=True))
            )

        yield first_call_alone(EngineChoice(self.name, self.precision), run)

    def _get_session(self, threads: int) -> Any:
        """Return the session of this process for a number of threads, which cannot be changed later."""
        key = os.getpid(), threads
        with FIRST_USE:
            if key not in self._sessions:
                self._sessions[key] = self._open_session(threads)
        return self._sessions[key]

    def _open_session(self, threads: int) -> Any:
        runtime = import_engine_package("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors only, which are raised as well
        path = str(self.folder / self.file)
        try:
            session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime does not document its exception classes
            raise CorruptFileError(path=path, cause=f"cannot be used by ONNX Runtime ({first_line(error)})") from None
        self.check_unchanged()
        return session
