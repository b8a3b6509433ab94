"""The model as ONNX Runtime runs it: from the ONNX file that `engines.cache` keeps, without torch."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.engines.base import Outputs, Run, cores, need
from vitrail.engines.cache import MODEL, ready
from vitrail.errors import DamagedError
from vitrail.weights.parts import Parts, read_parts


class OnnxEngine:
    """An ONNX file in its folder, with the parts of the bundle that it was made from."""

    def __init__(self, folder: Path, parts: Parts) -> None:
        self.folder, self.parts = folder, parts
        self._sessions: dict[int, Any] = {}

    @contextlib.contextmanager
    def running(self, threads: int | None) -> Generator[Run]:
        session = self._session(threads or cores())

        def run(pixels_BHWC: np.ndarray) -> Outputs:
            images = self.parts.preprocess.scale_array(pixels_BHWC)
            return Outputs(*session.run(["logits", "features"], {"pixel_values": images}))

        yield run

    def _session(self, threads: int) -> Any:
        """A session has its number of threads for life."""
        if threads not in self._sessions:
            runtime = need("onnxruntime")
            options = runtime.SessionOptions()
            options.intra_op_num_threads = threads
            options.log_severity_level = 3  # errors, which are raised as well
            path = str(self.folder / MODEL)
            try:
                self._sessions[threads] = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            except Exception as error:  # its own classes, which it does not promise
                reason = str(error).splitlines()[0]
                raise DamagedError(f"{path!r} cannot be used by ONNX Runtime ({reason}).") from None
        return self._sessions[threads]


def open_onnx(path: str | Path) -> OnnxEngine:
    """The engine for the bundle at `path`, whose weights are in the ONNX file and need not be read."""
    need("onnxruntime")
    parts = read_parts(path, weights=False)
    parts.check_classifies()
    return OnnxEngine(ready(path), parts)
