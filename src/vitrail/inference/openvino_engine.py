"""The OpenVINO engine: runs its intermediate representation of the ONNX graph without torch.

In int8, weights are stored as 8-bit integers with a scale for each output. Where the CPU multiplies such integers
(VNNI), OpenVINO rounds the inputs of these products, too, with a scale for every group of numbers of a token; elsewhere
it expands the weights. The rest is computed in bfloat16 where the CPU has it.
"""

import contextlib
import ctypes
import os
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.bundles.metadata import BundleInfo
from vitrail.core.errors import CorruptFileError, UnprovedError, UsageError, VitrailError, first_line
from vitrail.inference.engine import (
    FIRST_USE,
    EngineChoice,
    EngineOutputs,
    ExportSource,
    FileEngine,
    Run,
    cores,
    first_call_alone,
    import_engine_package,
)
from vitrail.inference.quantise import find_scales

MODEL = "model.xml"

# In int8, OpenVINO is left to choose for the rest: bfloat16 where the CPU has it.
HINTS = {"float32": {"INFERENCE_PRECISION_HINT": "f32"}, "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"}, "int8": {}}

_GROUPS = (128, 64, 32, 16)  # how many numbers of a token share a scale: more are faster, fewer more exact


class OpenvinoEngine(FileEngine):
    """A file of OpenVINO, with the metadata of its bundle. float32 and bfloat16 run the same file: where the CPU has
    bfloat16, OpenVINO would use it without being asked."""

    name = "openvino"
    precisions = ("float32", "bfloat16", "int8")
    packages = ("openvino",)
    kinds = {"float32": "openvino", "bfloat16": "openvino", "int8": "openvino-int8"}  # noqa: RUF012 - a constant
    by_cpu = ("bfloat16", "int8")

    def __init__(self, folder: Path, info: BundleInfo, precision: str = "float32") -> None:
        super().__init__(folder, info, precision)
        self._compiled: dict[tuple[int, int], Any] = {}

    @classmethod
    def check(cls, precision: str) -> None:
        super().check(precision)
        if precision == "bfloat16":
            known = _open_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            if "BF16" not in known:
                raise UsageError(
                    "Precision must be one that OpenVINO has on this CPU (float32, int8), got 'bfloat16', which this"
                    " CPU computes in software."
                )

    @classmethod
    def write(cls, source: ExportSource, folder: Path, precision: str) -> None:
        write_openvino(source, folder, precision)

    @contextlib.contextmanager
    def running(self, threads: int | None, callers: int = 1) -> Generator[Run]:
        model = self._model(threads or cores(), callers)
        own = threading.local()  # a request is for one thread

        def run(pixels_BHWC: np.ndarray) -> EngineOutputs:
            _refuse_fork()
            images = self.info.preprocess.scale_array(pixels_BHWC)
            with self.one_line_errors():
                if not hasattr(own, "request"):
                    own.request = model.create_infer_request()
                found = own.request.infer({"pixel_values": images}, share_inputs=True)
            return EngineOutputs(found["logits"], found["features"])

        yield first_call_alone(EngineChoice(self.name, self.precision), run)

    def _model(self, threads: int, callers: int) -> Any:
        """The compiled model, which computes so many calls at a time."""
        with FIRST_USE:
            if (threads, callers) not in self._compiled:
                self._compiled[threads, callers] = self._compile(threads, callers)
        return self._compiled[threads, callers]

    def _compile(self, threads: int, callers: int) -> Any:
        path = str(self.folder / MODEL)
        settings = {"INFERENCE_NUM_THREADS": threads * callers, "NUM_STREAMS": callers, **HINTS[self.precision]}
        core = _open_core()
        try:
            model = core.compile_model(path, "CPU", settings)
        except Exception as error:  # it promises no class of its own
            raise CorruptFileError(path=path, cause=f"cannot be used by OpenVINO ({first_line(error)})") from None
        self.check_unchanged()
        _compiled_models.add(model)
        return model


_processes: set[int] = set()  # that have started OpenVINO: this one, or those it was forked from
_compiled_models: weakref.WeakSet[Any] = weakref.WeakSet()


def _keep_models() -> None:
    """Never free the models that a fork inherits: their destructors need threads that it does not have, and crash."""
    for model in _compiled_models:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(model))


os.register_at_fork(after_in_child=_keep_models)


def _open_core() -> Any:
    """OpenVINO's core, in a process that can use it."""
    with FIRST_USE:
        openvino = import_engine_package("openvino", "openvino")
        _refuse_fork()
        _processes.add(os.getpid())
        return openvino.Core()


def _refuse_fork() -> None:
    """Raise in a process that was forked after OpenVINO had started threads: there, it waits for them for ever, or
    crashes, even if the model is opened again."""
    if _processes and os.getpid() not in _processes:
        raise UsageError(
            "Engine openvino must be used in a process that was not forked from one that has used it, got such a fork."
            ' Start processes with multiprocessing.get_context("spawn"), or use engine onnx.'
        )


def write_openvino(source: ExportSource, folder: Path, precision: str = "float32", batch: int | None = None) -> None:
    """Write model.xml and model.bin with weights in float32, or in int8, with the graph's metadata; a `batch` fixes its
    size."""
    from vitrail.inference.graph import find_graph, metadata

    openvino = import_engine_package("openvino", "openvino")
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        model = _read(find_graph(source, Path(aside)))
        if batch is not None:
            height, width = source.bundle.model.config.resolution
            model.reshape([batch, source.bundle.model.config.channels, height, width])
        if precision == "int8":
            _compress(openvino, model)
        for name, value in metadata(source).items():
            model.set_rt_info(value, ["vitrail", name])
        try:
            openvino.save_model(model, str(folder / MODEL), compress_to_fp16=False)
        except RuntimeError as error:  # it does not say that the disk is full
            raise VitrailError(f"OpenVINO cannot write its file ({first_line(error)}). Is the disk full?") from None


def _read(path: Path) -> Any:
    try:
        return _open_core().read_model(str(path))
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UnprovedError(
            f"Engine openvino cannot read this model ({lines[-1].strip() if lines else 'it says no more'}). Use another"
            " engine."
        ) from None


def _compress(openvino: Any, model: Any) -> None:
    """Store the matrices of products as 8-bit integers, and the size of the groups that inputs are rounded in."""
    build = import_engine_package("openvino.opset13", "openvino")
    weights: Counter[int] = Counter()  # their number, by the number of inputs
    for node in model.get_ordered_ops():
        source = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if source is None or source.get_type_name() != "Constant" or len(source.get_output_shape(0)) != 2:
            continue
        turns = node.get_attributes()
        matrix = np.asarray(source.get_data(), np.float32)
        steps_NK, scales_N1 = round_outputs(matrix if turns["transpose_b"] else matrix.T)
        stored = build.multiply(build.convert(build.constant(steps_NK), "f32"), build.constant(scales_N1))
        product = build.matmul(node.input_value(0), stored, turns["transpose_a"], transpose_b=True)
        node.output(0).replace(product.output(0))
        weights[steps_NK.shape[1]] += steps_NK.size
    group = next((size for size in _GROUPS if 2 * _divided(weights, size) >= weights.total()), _GROUPS[-1])
    model.set_rt_info(str(group), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    model.validate_nodes_and_infer_types()


def _divided(weights: Counter[int], size: int) -> int:
    """The number of weights whose inputs divide into groups of this size: others are slow with it."""
    return sum(count for inputs, count in weights.items() if inputs % size == 0)


def round_outputs(weights_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights as 8-bit integers (N, K), and the scale of each output (N, 1)."""
    scales_N1 = find_scales(np.abs(weights_NK).max(axis=1, keepdims=True))
    return np.rint(weights_NK / scales_N1).astype(np.int8), scales_N1
