"""The interface of engines: cropped images in, logits and features out.

An engine is one class and one line of `ENGINES` in `configs.engines`.
"""

import abc
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import numpy as np

from vitrail.configs.base import ModelConfig
from vitrail.telemetry import need as import_extra
from vitrail.weights.parts import Parts

if TYPE_CHECKING:
    from vitrail.weights.bundle import Bundle

_JOB_MACS = 6 * 10**9
_LARGEST_BATCH = 32


class Outputs(NamedTuple):
    """Logits (B, K) and features (B, D), the input of the head, in float32."""

    logits: np.ndarray
    features: np.ndarray


Run = Callable[[np.ndarray], Outputs]


class Engine(abc.ABC):
    """A bundle's model with a runtime."""

    parts: Parts
    packages: ClassVar[tuple[str, ...]]
    """Packages whose versions affect its speed."""
    start: ClassVar[str]
    """A Python program that does what a new process does before the first image; its argument is what `prepare`
    returns."""

    @classmethod
    def computes_on(cls, device: str) -> bool:
        """Whether it computes on a device."""
        return True

    @classmethod
    def prepare(cls, path: str | Path) -> Path:
        """Make what the engine needs besides the bundle, if it does not exist. Returns the path to open."""
        return Path(path)

    @classmethod
    @abc.abstractmethod
    def open(cls, bundle: "Bundle | str | Path", device: str | None = None) -> Self:
        """The engine for a bundle or for the path of one."""

    @abc.abstractmethod
    def running(self, threads: int | None) -> contextlib.AbstractContextManager[Run]:
        """Yield a function of cropped images, uint8 (B, H, W, C). Several threads may call it; each call computes with
        `threads` threads (None: the default number)."""


def cores() -> int:
    """Number of computing threads: $OMP_NUM_THREADS, otherwise the cores that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batch_for(config: ModelConfig) -> int:
    """Batch size of one thread: large enough to make call overhead negligible, small enough for its cache."""
    return min(max(_JOB_MACS // config.macs, 1), _LARGEST_BATCH)


def need(package: str, engine: str) -> ModuleType:
    """Import an optional package of an engine, whose extra has the engine's name."""
    return import_extra(package, extra=engine, subject=f"Engine {engine}")
