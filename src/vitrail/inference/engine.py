"""The interface of engines: cropped images in, logits and features out.

An engine is one class and one line of `ENGINES` in `inference.registry`.
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

_JOB_MACS = 6 * 10**9
_LARGEST_BATCH = 32
_TRIES = 5  # to read a bundle that is being replaced

FIRST_USE = threading.RLock()
"""Held while an engine's library is opened or computes for the first time. Libraries initialise themselves lazily, with
locks of their own: OpenVINO has one that a thread awaits while it holds Python's, so two threads that begin at the same
time can wait for each other for ever. A fork waits, too: a child would inherit a library that is half initialised."""
os.register_at_fork(before=FIRST_USE.acquire, after_in_parent=FIRST_USE.release, after_in_child=FIRST_USE.release)


class EngineOutputs(NamedTuple):
    """Logits (B, K) and features (B, D), the input of the head, in float32."""

    logits: np.ndarray
    features: np.ndarray


Run = Callable[[np.ndarray], EngineOutputs]


class EngineRequest(NamedTuple):
    """An engine and a precision that the user asked for, each of which may be `auto`."""

    engine: str = "torch"
    precision: str = "float32"
    tolerance: float = 0.02
    """Of precision `auto`: the largest share of predictions that may differ from those in float32."""

    def check(self) -> None:
        """Refuse an unknown engine or precision, and a precision that the engine does not have."""
        for noun, name, names in (("Engine", self.engine, ENGINES), ("Precision", self.precision, PRECISIONS)):
            if name != "auto" and name not in names:
                near = did_you_mean(name, names)
                raise UsageError(f"{noun} must be {', '.join(names)} or auto, got {name!r}.{near}")
        Bounds(0, 1).check("tolerance", self.tolerance)
        if "auto" not in (self.engine, self.precision):
            ENGINES[self.engine].check(self.precision)


DEFAULT_REQUEST = EngineRequest()


class EngineChoice(NamedTuple):
    """An engine, and the precision it computes in."""

    engine: str
    precision: str

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}"


_USED: set[EngineChoice] = set()


def first_call_alone(choice: EngineChoice, run: Run) -> Run:
    """The same function, whose first call in this process is computed while no other thread is inside."""

    def call(pixels_BHWC: np.ndarray) -> EngineOutputs:
        if choice in _USED:
            return run(pixels_BHWC)
        with FIRST_USE:
            outputs = run(pixels_BHWC)
            _USED.add(choice)
            return outputs

    return call


class Engine(abc.ABC):
    """A bundle's model with a runtime."""

    info: BundleInfo
    name: ClassVar[str]
    precisions: ClassVar[tuple[str, ...]]
    """Those it can compute in, the exact one first."""
    packages: ClassVar[tuple[str, ...]]
    """What it needs installed; the extra that installs it has the engine's name. Versions affect speed and answers."""

    @classmethod
    def check(cls, precision: str) -> None:
        """Refuse a precision that the engine does not have, or not on this machine, and an engine that is not
        installed."""
        if precision not in cls.precisions:
            raise UsageError(
                f"Precision must be one that engine {cls.name} has ({', '.join(cls.precisions)}), got {precision!r}."
            )
        for package in cls.packages:
            if sys.modules.get(package) is None:
                import_engine_package(package, cls.name)

    @classmethod
    def computes_on(cls, device: str) -> bool:
        """Whether it computes on a device, or on `auto`, whichever that is."""
        return True

    @classmethod
    def depends_on_batch(cls, config: ModelConfig, precision: str) -> bool:
        """Whether a prediction may depend on the other images of its batch."""
        return False

    @classmethod
    def prepare(cls, path: str | Path, precision: str) -> Path:
        """Make what the engine needs besides the bundle, if it does not exist. Returns the folder that it reads."""
        return check_folder(path)

    @classmethod
    @abc.abstractmethod
    def open(cls, bundle: "Bundle | str | Path", device: str | None = None, precision: str = "float32") -> Self:
        """The engine for a bundle or for the path of one, on a device: by default on `auto`, or where a bundle is."""

    @abc.abstractmethod
    def running(self, threads: int | None, callers: int = 1) -> contextlib.AbstractContextManager[Run]:
        """Yield a function of cropped images, uint8 (B, H, W, C). `callers` threads may call it at a time; each call
        computes with `threads` threads (None: the default number)."""


class FileEngine(Engine):
    """An engine that runs a file made from the bundle, on the CPU. The file is made and verified against torch on first
    use and kept in a folder (`inference.model_files`); the bundle's own weights are not read after that."""

    kinds: ClassVar[dict[str, str]]
    """The kind of file for each precision: the ending of the folder that holds it."""
    by_cpu: ClassVar[tuple[str, ...]] = ()
    """Precisions in which another CPU may compute otherwise: there, the file is proved again."""

    def __init__(self, folder: Path, info: BundleInfo, precision: str = "float32") -> None:
        self.folder, self.info, self.precision = folder, info, precision
        self.key: str | None = None
        self._stamp = _stamp(folder)

    def check_unchanged(self) -> None:
        """Raise if the file is no longer the bundle's as it was opened. To be called after the file is read, which may
        be late: for each number of threads it is read anew."""
        if (stamp := _stamp(self.folder)) == self._stamp:
            return
        from vitrail.inference.model_files import is_intact

        if self.key is None or not is_intact(self.folder, self.key, type(self), self.precision):
            raise CorruptFileError(
                path=self.folder,
                cause=f"was replaced or changed while engine {self.name} was using it",
                advice="Open the model again.",
            )
        self._stamp = stamp

    @contextlib.contextmanager
    def one_line_errors(self) -> Generator[None]:
        """Turn errors of the engine's library, such as too little memory, into ours."""
        try:
            yield
        except VitrailError:
            raise
        except Exception as error:  # libraries promise no classes of their own
            raise VitrailError(
                f"Engine {self.name} cannot compute with {str(self.folder)!r} ({first_line(error)})."
            ) from None

    @classmethod
    @abc.abstractmethod
    def write(cls, source: "ExportSource", folder: Path, precision: str) -> None:
        """Write the file, or several, into an empty folder."""

    @classmethod
    def sharing(cls, precision: str) -> list[str]:
        """The precisions that run the same file, the most exact one first. The file is proved in each that this CPU
        has."""
        return [one for one in cls.precisions if cls.kinds[one] == cls.kinds[precision]]

    @classmethod
    def computes_on(cls, device: str) -> bool:
        return device in ("auto", "cpu")

    @classmethod
    def prepare(cls, path: str | Path, precision: str) -> Path:
        from vitrail.inference.model_files import ready

        cls.check(precision)
        return ready(path, cls, precision)

    @classmethod
    def open(cls, bundle: "Bundle | str | Path", device: str | None = None, precision: str = "float32") -> Self:
        if device is not None and not cls.computes_on(device):
            raise UsageError(f"Device must be cpu for engine {cls.name}, got {device!r}. Use engine torch.")
        if not isinstance(bundle, str | Path):
            raise UsageError(f"Engine {cls.name} must be given the path of a bundle, got one in memory. Save it first.")
        from vitrail.inference.model_files import fingerprint, is_of

        cls.check(precision)
        for _ in range(_TRIES):
            key = fingerprint(check_folder(bundle))
            info = read_bundle_info(bundle, weights=False)
            opened = cls(cls.prepare(bundle, precision), info, precision)
            # A training run may replace the bundle meanwhile: labels of one model must not go with answers of another.
            if fingerprint(check_folder(bundle)) == key and is_of(opened.folder, key):
                opened.key = key
                return opened
        raise CorruptFileError(
            path=bundle, cause="changes all the time", advice="Wait until nobody writes it any more."
        )


def _stamp(folder: Path) -> dict[str, tuple[int, ...]]:
    """Which files of a model a folder holds, and since when."""
    found = {file.name: file.stat() for file in sorted(folder.glob("model.*"))}
    return {name: (one.st_ino, one.st_size, one.st_mtime_ns) for name, one in found.items()}


class ExportSource(NamedTuple):
    """What files of engines are made from."""

    path: Path
    """The bundle's folder."""
    bundle: "Bundle"
    """The same, loaded; in float32 and evaluation mode."""
    key: str
    """Its fingerprint."""


def cores() -> int:
    """Number of computing threads: $OMP_NUM_THREADS, at most the cores that this process may use; otherwise all of
    these."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return limit_threads(int(wanted) if wanted.isdecimal() and int(wanted) > 0 else None)


def limit_threads(threads: int | None) -> int:
    """At most as many threads as this process may use cores, by default all of these: with hundreds, engines seem to
    hang. A note says so."""
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads is None:
        return most
    if threads > most:
        _note_limit(threads, most)
    return min(threads, most)


@functools.cache  # once a process
def _note_limit(threads: int, most: int) -> None:
    say(f"note: {threads:,} threads are lowered to {most}, the number of cores")


def version_of(package: str) -> str:
    """Version of an installed package. Some are installed under other names than they are imported (onnxruntime-gpu),
    so it may be unknown."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def processor() -> tuple[str, str]:
    """Name of the CPU, and a hash of its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    about = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    features = about.get("flags") or about.get("Features", "")  # of x86, of ARM
    name = about.get("model name") or platform.processor() or platform.machine()
    return name, hashlib.sha256(features.encode()).hexdigest()[:12]


def batch_for(config: ModelConfig) -> int:
    """Batch size of one thread: large enough to make call overhead negligible, small enough for its cache."""
    return min(max(_JOB_MACS // config.macs, 1), _LARGEST_BATCH)


def import_engine_package(package: str, engine: str) -> ModuleType:
    """Import an optional package of an engine, whose extra has the engine's name."""
    return import_extra(package, extra=engine, subject=f"Engine {engine}")
