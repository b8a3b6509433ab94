"""The ONNX Runtime engine: runs the ONNX file of `engines.cache` without torch."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from vitrail.engines.base import Engine, Outputs, Run, cores, need
from vitrail.engines.cache import MODEL, ready
from vitrail.errors import DamagedError, UsageError, first_line
from vitrail.weights.parts import Parts, read_parts

if TYPE_CHECKING:
    from vitrail.weights.bundle import Bundle


class OnnxEngine(Engine):
    """An ONNX file, with the other parts of its bundle."""

    packages = ("onnxruntime",)
    start = (
        "import sys; from vitrail.engines.base import need;"
        f" need('onnxruntime', 'onnx').InferenceSession(sys.argv[1] + '/{MODEL}')"
    )

    def __init__(self, folder: Path, parts: Parts) -> None:
        self.folder, self.parts = folder, parts
        self._sessions: dict[int, Any] = {}

    @classmethod
    def computes_on(cls, device: str) -> bool:
        return device == "cpu"

    @classmethod
    def prepare(cls, path: str | Path) -> Path:
        need("onnxruntime", "onnx")
        return ready(path)

    @classmethod
    def open(cls, bundle: "Bundle | str | Path", device: str | None = None) -> Self:
        """Open the ONNX file; the bundle's own weights are not read."""
        if device not in (None, "auto") and not cls.computes_on(device):
            raise UsageError(f"Device must be cpu for engine onnx, got {device!r}. Use engine torch.")
        if not isinstance(bundle, str | Path):
            raise UsageError("Engine onnx must be given the path of a bundle, got one in memory. Save it first.")
        need("onnxruntime", "onnx")
        parts = read_parts(bundle, weights=False)
        return cls(cls.prepare(bundle), parts)

    @contextlib.contextmanager
    def running(self, threads: int | None) -> Generator[Run]:
        session = self._session(threads or cores())

        def run(pixels_BHWC: np.ndarray) -> Outputs:
            images = self.parts.preprocess.scale_array(pixels_BHWC)
            return Outputs(*session.run(["logits", "features"], {"pixel_values": images}))

        yield run

    def _session(self, threads: int) -> Any:
        """A session; its number of threads cannot be changed later."""
        if threads not in self._sessions:
            runtime = need("onnxruntime", "onnx")
            options = runtime.SessionOptions()
            options.intra_op_num_threads = threads
            options.log_severity_level = 3  # errors, which are raised as well
            path = str(self.folder / MODEL)
            try:
                self._sessions[threads] = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            except Exception as error:  # its own classes, which it does not promise
                raise DamagedError(path=path, cause=f"cannot be used by ONNX Runtime ({first_line(error)})") from None
        return self._sessions[threads]
