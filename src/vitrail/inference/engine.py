"""Interface of the engines that run a bundle's model: cropped images in, logits and features out.

An engine is a class that is registered in `ENGINES` of `inference.registry`.
"""

import abc
import contextlib
import functools
import hashlib
import os
import platform
import sys
import threading
from collections.abc import Callable, Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np

from vitrail.bundles.folder import check_folder
from vitrail.bundles.metadata import BundleInfo, read_bundle_info
from vitrail.core.errors import CorruptFileError, UsageError, VitrailError, did_you_mean, first_line
from vitrail.core.optional import import_extra
from vitrail.core.settings import Bounds
from vitrail.core.terminal import say
from vitrail.inference.registry import ENGINES, PRECISIONS
from vitrail.models.config import ModelConfig

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle

_BATCH_MACS = 6 * 10**9  # multiply-accumulates of a batch
_LARGEST_BATCH = 32
_READ_ATTEMPTS = 5  # attempts to read a bundle while another process replaces it

FIRST_USE = threading.RLock()
"""Lock that is held while an engine's library is opened or computes for the first time.

Libraries initialise themselves lazily, with their own locks. In OpenVINO a thread waits for such a lock while it holds
Python's, so two threads that start at the same time can deadlock. A fork waits for this lock as well: the child would
inherit a half-initialised library.
"""
os.register_at_fork(before=FIRST_USE.acquire, after_in_parent=FIRST_USE.release, after_in_child=FIRST_USE.release)


class EngineOutputs(NamedTuple):
    """Logits (B, K) and features (B, D), the input of the head, in float32."""

    logits: np.ndarray
    features: np.ndarray


Run = Callable[[np.ndarray], EngineOutputs]
"""A function from cropped images, uint8 (B, H, W, C), to their outputs."""


class EngineRequest(NamedTuple):
    """The engine and the precision that the user requested. Each may be `auto`."""

    engine: str = "torch"
    precision: str = "float32"
    tolerance: float = 0.02
    """For precision `auto`: the largest share of predictions that may differ from those in float32."""

    def check(self) -> None:
        """Raise if the engine or the precision is unknown, or if this machine cannot run the combination."""
        for noun, name, names in (("Engine", self.engine, ENGINES), ("Precision", self.precision, PRECISIONS)):
            if name != "auto" and name not in names:
                suggestion = did_you_mean(name, names)
                raise UsageError(f"{noun} must be {', '.join(names)} or auto, got {name!r}.{suggestion}")
        Bounds(0, 1).check("tolerance", self.tolerance)
        if "auto" not in (self.engine, self.precision):
            ENGINES[self.engine].check(self.precision)


DEFAULT_REQUEST = EngineRequest()


class EngineChoice(NamedTuple):
    """An engine and the precision in which it computes."""

    engine: str
    precision: str

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}"


_USED: set[EngineChoice] = set()


def first_call_alone(choice: EngineChoice, run: Run) -> Run:
    """Wrap the function of an engine so that its first call in this process runs alone.

    Until that call returns, other threads that open an engine or call one for the first time wait for `FIRST_USE`:
    libraries that initialise themselves at the same time can deadlock.
    """

    def run_alone_once(pixels_BHWC: np.ndarray) -> EngineOutputs:
        if choice in _USED:
            return run(pixels_BHWC)
        with FIRST_USE:
            outputs = run(pixels_BHWC)
            _USED.add(choice)
            return outputs

    return run_alone_once


class Engine(abc.ABC):
    """A bundle's model in a runtime."""

    info: BundleInfo
    name: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]]
    """Precisions in which the engine can compute. The first one is exact."""
    packages: ClassVar[tuple[str, ...]]
    """Packages that the engine imports. The extra that installs them has the engine's name. Their versions affect speed
    and predictions."""

    @classmethod
    def check(cls, precision: str) -> None:
        """Raise if the engine does not have the precision, if this machine does not, or if a package is missing."""
        if precision not in cls.precisions:
            raise UsageError(
                f"Precision must be one that engine {cls.name} has ({', '.join(cls.precisions)}), got {precision!r}."
            )
        for package in cls.packages:
            if sys.modules.get(package) is None:
                import_engine_package(package, cls.name)

    @classmethod
    def computes_on(cls, device: str) -> bool:
        """Return whether the engine can compute on a device, or on any device if it is `auto`."""
        return True

    @classmethod
    def depends_on_batch(cls, config: ModelConfig, precision: str) -> bool:
        """Return whether a prediction may depend on the other images of its batch."""
        return False

    @classmethod
    def prepare(cls, path: str | Path, precision: str) -> Path:
        """Create the files that the engine needs besides the bundle, if necessary. Return the folder that it reads."""
        return check_folder(path)

    @classmethod
    @abc.abstractmethod
    def open(cls, bundle: "Bundle | str | Path", device: str | None = None, precision: str = "float32") -> Self:
        """Open a bundle, or the bundle at a path, with this engine.

        `device` is by default `auto` for a path, and the device of the model for a bundle in memory.
        """

    @abc.abstractmethod
    def running(self, threads: int | None, callers: int = 1) -> contextlib.AbstractContextManager[Run]:
        """Yield a function that computes the outputs of cropped images, uint8 (B, H, W, C).

        At most `callers` threads may call it at a time. Each call computes with `threads` threads (None: the default
        number).
        """


class FileEngine(Engine):
    """An engine that runs a model file on the CPU.

    The file is built from the bundle on first use, verified against torch and stored in a folder
    (`inference.model_files`). After that, the weights of the bundle are not read any more.
    """

    folder_suffixes: ClassVar[dict[str, str]]
    """Suffix of the folder with the model file, by precision. Precisions with the same suffix share a file."""
    cpu_dependent: ClassVar[tuple[str, ...]] = ()
    """Precisions whose outputs may differ between CPUs. On another CPU, the file is verified again."""

    def __init__(self, folder: Path, info: BundleInfo, precision: str = "float32") -> None:
        self.folder, self.info, self.precision = folder, info, precision
        self.key: str | None = None
        self._file_stamps = _stamp_files(folder)

    def check_unchanged(self) -> None:
        """Raise CorruptFileError if the model file was replaced or changed after this engine was opened.

        To be called each time after the file is read: it is read again for each number of threads.
        """
        if (file_stamps := _stamp_files(self.folder)) == self._file_stamps:
            return
        from vitrail.inference.model_files import is_intact

        if self.key is None or not is_intact(self.folder, self.key, type(self), self.precision):
            raise CorruptFileError(
                path=self.folder,
                cause=f"was replaced or changed while engine {self.name} was using it",
                advice="Open the model again.",
            )
        self._file_stamps = file_stamps

    @contextlib.contextmanager
    def one_line_errors(self) -> Generator[None]:
        """Convert exceptions of the engine's library, such as too little memory, to VitrailError."""
        try:
            yield
        except VitrailError:
            raise
        except Exception as error:  # libraries do not document their exception classes
            raise VitrailError(
                f"Engine {self.name} cannot compute with {str(self.folder)!r} ({first_line(error)})."
            ) from None

    @classmethod
    @abc.abstractmethod
    def write(cls, source: "ExportSource", folder: Path, precision: str) -> None:
        """Write the model file or files into an empty folder."""

    @classmethod
    def precisions_of_file(cls, precision: str) -> list[str]:
        """Return all precisions that run the same file as this one, the most exact one first.

        The file is verified in each of them that this CPU has.
        """
        return [name for name in cls.precisions if cls.folder_suffixes[name] == cls.folder_suffixes[precision]]

    @classmethod
    def computes_on(cls, device: str) -> bool:
        return device in ("auto", "cpu")

    @classmethod
    def prepare(cls, path: str | Path, precision: str) -> Path:
        from vitrail.inference.model_files import prepare_model_file

        cls.check(precision)
        return prepare_model_file(path, cls, precision)

    @classmethod
    def open(cls, bundle: "Bundle | str | Path", device: str | None = None, precision: str = "float32") -> Self:
        if device is not None and not cls.computes_on(device):
            raise UsageError(f"Device must be cpu for engine {cls.name}, got {device!r}. Use engine torch.")
        if not isinstance(bundle, str | Path):
            raise UsageError(
                f"Engine {cls.name} must be given the path of a bundle, got a bundle in memory. Save it first."
            )
        from vitrail.inference.model_files import belongs_to_bundle, fingerprint

        cls.check(precision)
        for _ in range(_READ_ATTEMPTS):
            key = fingerprint(check_folder(bundle))
            info = read_bundle_info(bundle, weights=False)
            engine = cls(cls.prepare(bundle, precision), info, precision)
            # A training run may replace the bundle meanwhile: labels and predictions must be of the same model.
            if fingerprint(check_folder(bundle)) == key and belongs_to_bundle(engine.folder, key):
                engine.key = key
                return engine
        raise CorruptFileError(
            path=bundle,
            cause="changed each time it was read",
            advice="Wait until no other process writes to it.",
        )


def _stamp_files(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return inode, size and modification time of each model file in a folder."""
    stats = {file.name: file.stat() for file in sorted(folder.glob("model.*"))}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


class ExportSource(NamedTuple):
    """A bundle from which model files are built."""

    path: Path
    """Folder of the bundle."""
    bundle: "Bundle"
    """The loaded bundle, with its model in float32 and evaluation mode."""
    key: str
    """Fingerprint of the bundle."""


def thread_count(threads: int | None = None) -> int:
    """Return the number of computing threads: `threads` ($OMP_NUM_THREADS, or all available cores), lowered to the
    available cores with a note.

    With hundreds of threads, engines seem to hang.
    """
    core_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads is None:
        variable = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(variable) if variable.isdecimal() and int(variable) > 0 else core_count
    if threads > core_count:
        _note_thread_limit(threads, core_count)
    return min(threads, core_count)


@functools.cache  # once per process
def _note_thread_limit(threads: int, core_count: int) -> None:
    say(f"note: {threads:,} threads are lowered to {core_count}, the number of cores")


def version_of(package: str) -> str:
    """Return the version of an installed package, or "unknown" if it is installed under another name.

    For example, the package onnxruntime-gpu is imported as onnxruntime.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def processor() -> tuple[str, str]:
    """Return the name of the CPU and a hash of its instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    instructions = fields.get("flags") or fields.get("Features", "")  # on x86, on ARM
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, hashlib.sha256(instructions.encode()).hexdigest()[:12]


def batch_for(config: ModelConfig) -> int:
    """Return the batch size of a thread: the overhead of a call is negligible, and the batch fits its cache."""
    return min(max(_BATCH_MACS // config.macs, 1), _LARGEST_BATCH)


def import_engine_package(package: str, engine: str) -> ModuleType:
    """Import an optional package of an engine. The extra that installs it has the engine's name."""
    return import_extra(package, extra=engine, subject=f"Engine {engine}")
