"""What every engine is: cropped images in, logits and features out.

An engine is one class, which opens a bundle, runs it and says how it is started, and one line of `configs.engines`.
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
from vitrail.errors import MissingError
from vitrail.telemetry import import_quietly
from vitrail.weights.parts import Parts

if TYPE_CHECKING:
    from vitrail.weights.bundle import Bundle

_JOB_MACS = 6 * 10**9
_LARGEST_BATCH = 32


class Outputs(NamedTuple):
    """For each image the logits (B, K) and what the head read (B, D), in float32."""

    logits: np.ndarray
    features: np.ndarray


Run = Callable[[np.ndarray], Outputs]


class Engine(abc.ABC):
    """A bundle's model with something that computes it."""

    parts: Parts
    packages: ClassVar[tuple[str, ...]]
    """Whose versions decide about its speed."""
    start: ClassVar[str]
    """A program that does what a new process must do before the first image; its argument is what `prepare` returns."""

    @classmethod
    def prepare(cls, path: str | Path) -> Path:
        """Make what the engine needs besides the bundle, where it is not there yet. Returns what is then opened."""
        return Path(path)

    @classmethod
    @abc.abstractmethod
    def open(cls, bundle: "Bundle | str | Path", device: str | None = None) -> Self:
        """The engine for a bundle, or for the one at a path."""

    @abc.abstractmethod
    def running(self, threads: int | None) -> contextlib.AbstractContextManager[Run]:
        """A function of cropped images, uint8 (B, H, W, C). Threads may call it at once; each call computes with
        `threads` (None: as many as is usual)."""


def cores() -> int:
    """How many threads may compute: $OMP_NUM_THREADS, else the cores that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batch_for(config: ModelConfig) -> int:
    """Images that one thread computes at a time: enough to outweigh the calls, few enough to stay in its cache."""
    return min(max(_JOB_MACS // config.macs, 1), _LARGEST_BATCH)


def need(package: str) -> ModuleType:
    """An optional package of the ONNX engine, or one line that says how to get it."""
    try:
        return import_quietly(package)
    except ImportError:
        raise MissingError(
            f"Engine onnx needs the 'onnx' extra ({package} is missing). Run: pip install \"vitrail[onnx]\"."
        ) from None
