"""The OpenVINO engine: runs its intermediate representation of the ONNX graph without torch."""

import contextlib
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.engines.base import FileEngine, Outputs, Run, Source, cores, need
from vitrail.errors import DamagedError, UsageError, VitrailError, first_line
from vitrail.weights.parts import Parts

MODEL = "model.xml"

_HINTS = {"float32": "f32", "bfloat16": "bf16"}


class OpenvinoEngine(FileEngine):
    """A file of OpenVINO, with the other parts of its bundle. Both precisions run the same file: where the CPU has
    bfloat16, OpenVINO would use it without being asked."""

    name = "openvino"
    precisions = ("float32", "bfloat16")
    packages = ("openvino",)
    kinds = dict.fromkeys(precisions, "openvino")

    def __init__(self, folder: Path, parts: Parts, precision: str = "float32") -> None:
        super().__init__(folder, parts, precision)
        self._compiled: dict[tuple[int, int], Any] = {}

    @classmethod
    def check(cls, precision: str) -> None:
        super().check(precision)
        if precision == "bfloat16":
            known = need("openvino", "openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            if "BF16" not in known:
                raise UsageError(
                    "Precision must be one that OpenVINO has on this CPU (float32), got 'bfloat16', which this CPU"
                    " computes in software."
                )

    @classmethod
    def write(cls, source: Source, folder: Path, precision: str) -> None:
        write_openvino(source, folder)

    @contextlib.contextmanager
    def running(self, threads: int | None, callers: int = 1) -> Generator[Run]:
        model = self._model(threads or cores(), callers)
        own = threading.local()  # a request is for one thread

        def run(pixels_BHWC: np.ndarray) -> Outputs:
            if not hasattr(own, "request"):
                own.request = model.create_infer_request()
            images = self.parts.preprocess.scale_array(pixels_BHWC)
            found = own.request.infer({"pixel_values": images}, share_inputs=True)
            return Outputs(found["logits"], found["features"])

        yield run

    def _model(self, threads: int, callers: int) -> Any:
        """The compiled model, which computes so many calls at a time."""
        if (threads, callers) not in self._compiled:
            path = str(self.folder / MODEL)
            settings = {
                "INFERENCE_PRECISION_HINT": _HINTS[self.precision],
                "INFERENCE_NUM_THREADS": threads * callers,
                "NUM_STREAMS": callers,
            }
            try:
                self._compiled[threads, callers] = (
                    need("openvino", "openvino").Core().compile_model(path, "CPU", settings)
                )
            except Exception as error:  # it promises no class of its own
                raise DamagedError(path=path, cause=f"cannot be used by OpenVINO ({first_line(error)})") from None
        return self._compiled[threads, callers]


def write_openvino(source: Source, folder: Path, batch: int | None = None) -> None:
    """Write model.xml and model.bin in float32, with the graph's metadata; a `batch` fixes its size."""
    from vitrail.engines.export import find_graph, metadata

    openvino = need("openvino", "openvino")
    with tempfile.TemporaryDirectory(prefix="vitrail-") as aside:
        model = openvino.Core().read_model(str(find_graph(source, Path(aside))))
        if batch is not None:
            height, width = source.bundle.model.config.resolution
            model.reshape([batch, source.bundle.model.config.channels, height, width])
        for name, value in metadata(source).items():
            model.set_rt_info(value, ["vitrail", name])
        try:
            openvino.save_model(model, str(folder / MODEL), compress_to_fp16=False)
        except RuntimeError as error:  # it does not say that the disk is full
            raise VitrailError(f"OpenVINO cannot write its file ({first_line(error)}). Is the disk full?") from None
