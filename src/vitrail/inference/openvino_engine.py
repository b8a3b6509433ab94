"""The OpenVINO engine, which runs OpenVINO's intermediate representation of the ONNX graph without torch.

In int8, weights are stored as 8-bit integers with a scale for each output. If the CPU multiplies 8-bit integers (VNNI),
OpenVINO also rounds the inputs of these products, with a scale for every group of numbers of a token. Otherwise it
expands the weights. The other operators are computed in bfloat16 if the CPU has it.
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
    first_call_alone,
    import_engine_package,
    thread_count,
)
from vitrail.inference.quantise import find_scales

MODEL = "model.xml"

# In int8, OpenVINO chooses the precision of the other operators: bfloat16 if the CPU has it.
HINTS = {"float32": {"INFERENCE_PRECISION_HINT": "f32"}, "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"}, "int8": {}}

_GROUP_SIZES = (128, 64, 32, 16)  # numbers of a token that share a scale: larger is faster, smaller more exact


class OpenvinoEngine(FileEngine):
    """An OpenVINO model file, with the metadata of its bundle.

    float32 and bfloat16 run the same file. Without the hint f32, OpenVINO would use bfloat16 wherever the CPU has it.
    """

    name = "openvino"
    precisions = ("float32", "bfloat16", "int8")
    packages = ("openvino",)
    folder_suffixes = {"float32": "openvino", "bfloat16": "openvino", "int8": "openvino-int8"}  # noqa: RUF012 - a constant
    cpu_dependent = ("bfloat16", "int8")

    def __init__(self, folder: Path, info: BundleInfo, precision: str = "float32") -> None:
        super().__init__(folder, info, precision)
        self._compiled: dict[tuple[int, int], Any] = {}

    @classmethod
    def check(cls, precision: str) -> None:
        super().check(precision)
        if precision == "bfloat16":
            capabilities = _open_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            if "BF16" not in capabilities:
                raise UsageError(
                    "Precision must be one that OpenVINO has on this CPU (float32, int8), got 'bfloat16', which this"
                    " CPU computes in software."
                )

    @classmethod
    def write(cls, source: ExportSource, folder: Path, precision: str) -> None:
        write_openvino(source, folder, precision)

    @contextlib.contextmanager
    def running(self, threads: int | None, callers: int = 1) -> Generator[Run]:
        model = self._get_compiled_model(thread_count(threads), callers)
        local = threading.local()  # threads cannot share an inference request

        def run(pixels_BHWC: np.ndarray) -> EngineOutputs:
            _refuse_fork()
            images = self.info.preprocess.scale_array(pixels_BHWC)
            with self.one_line_errors():
                if not hasattr(local, "request"):
                    local.request = model.create_infer_request()
                outputs = local.request.infer({"pixel_values": images}, share_inputs=True)
            return EngineOutputs(outputs["logits"], outputs["features"])

        yield first_call_alone(EngineChoice(self.name, self.precision), run)

    def _get_compiled_model(self, threads: int, callers: int) -> Any:
        """Return the compiled model for `callers` calls at a time with `threads` threads each."""
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
        except Exception as error:  # OpenVINO does not document its exception classes
            raise CorruptFileError(path=path, cause=f"cannot be used by OpenVINO ({first_line(error)})") from None
        self.check_unchanged()
        _compiled_models.add(model)
        return model


_process_ids: set[int] = set()  # processes that started OpenVINO: this one, or its parents if it was forked
_compiled_models: weakref.WeakSet[Any] = weakref.WeakSet()


def _leak_inherited_models() -> None:
    """Never free the models that a fork inherits: their destructors need threads that it does not have, and crash."""
    for model in _compiled_models:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(model))


os.register_at_fork(after_in_child=_leak_inherited_models)


def _open_core() -> Any:
    """Return an OpenVINO core. Raises UsageError in a fork that cannot use OpenVINO."""
    with FIRST_USE:
        openvino = import_engine_package("openvino", "openvino")
        _refuse_fork()
        _process_ids.add(os.getpid())
        return openvino.Core()


def _refuse_fork() -> None:
    """Raise UsageError in a process that was forked after OpenVINO had started threads.

    There, OpenVINO hangs or crashes, even if the model is opened again.
    """
    if _process_ids and os.getpid() not in _process_ids:
        raise UsageError(
            "Engine openvino must be used in a process that was not forked from one that has used it, got a forked"
            " process."
            ' Start processes with multiprocessing.get_context("spawn"), or use engine onnx.'
        )


def write_openvino(source: ExportSource, folder: Path, precision: str = "float32", batch: int | None = None) -> None:
    """Write model.xml and model.bin, with metadata and weights in float32 or int8. A `batch` fixes the batch size."""
    from vitrail.inference.graph import find_graph, metadata

    openvino = import_engine_package("openvino", "openvino")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        model = _read_onnx(find_graph(source, Path(scratch)))
        if batch is not None:
            height, width = source.bundle.model.config.resolution
            model.reshape([batch, source.bundle.model.config.channels, height, width])
        if precision == "int8":
            _quantise_weights(openvino, model)
        for name, value in metadata(source).items():
            model.set_rt_info(value, ["vitrail", name])
        try:
            openvino.save_model(model, str(folder / MODEL), compress_to_fp16=False)
        except RuntimeError as error:  # its message does not mention a full disk
            raise VitrailError(f"OpenVINO cannot write its file ({first_line(error)}). Is the disk full?") from None


def _read_onnx(path: Path) -> Any:
    try:
        return _open_core().read_model(str(path))
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else "no reason reported"
        raise UnprovedError(f"Engine openvino cannot read this model ({reason}). Use another engine.") from None


def _quantise_weights(openvino: Any, model: Any) -> None:
    """Replace the weights of matrix products by 8-bit integers and scales, in place.

    Also set the size of the groups of inputs that share a scale: the largest that divides most inputs.
    """
    build = import_engine_package("openvino.opset13", "openvino")
    weight_counts: Counter[int] = Counter()  # number of weights, by the number of inputs of their product
    for node in model.get_ordered_ops():
        source = node.input_value(1).get_node() if node.get_type_name() == "MatMul" else None
        if source is None or source.get_type_name() != "Constant" or len(source.get_output_shape(0)) != 2:
            continue
        attributes = node.get_attributes()
        matrix = np.asarray(source.get_data(), np.float32)
        steps_NK, scales_N1 = round_outputs(matrix if attributes["transpose_b"] else matrix.T)
        weights = build.multiply(build.convert(build.constant(steps_NK), "f32"), build.constant(scales_N1))
        product = build.matmul(node.input_value(0), weights, attributes["transpose_a"], transpose_b=True)
        node.output(0).replace(product.output(0))
        weight_counts[steps_NK.shape[1]] += steps_NK.size
    majority = weight_counts.total() / 2
    group = next((size for size in _GROUP_SIZES if _count_divisible(weight_counts, size) >= majority), _GROUP_SIZES[-1])
    model.set_rt_info(str(group), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    model.validate_nodes_and_infer_types()


def _count_divisible(weight_counts: Counter[int], size: int) -> int:
    """Return the number of weights whose inputs divide into groups of this size. Other products are slow with it."""
    return sum(count for inputs, count in weight_counts.items() if inputs % size == 0)


def round_outputs(weights_NK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round weights to 8-bit integers (N, K), and return them with the scale of each output (N, 1)."""
    scales_N1 = find_scales(np.abs(weights_NK).max(axis=1, keepdims=True))
    return np.rint(weights_NK / scales_N1).astype(np.int8), scales_N1
