"""What every engine is: cropped pictures in, logits and features out."""

import contextlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Literal, NamedTuple, Protocol

import numpy as np

from vitrail.configs.base import ModelConfig
from vitrail.errors import MissingError
from vitrail.telemetry import import_quietly
from vitrail.weights.parts import Parts

_JOB_MACS = 6 * 10**9
_LARGEST_BATCH = 32


class Outputs(NamedTuple):
    """For each picture the logits (B, K) and what the head read (B, D), as 32-bit reals."""

    logits: np.ndarray
    features: np.ndarray


EngineName = Literal["torch", "onnx"]
Run = Callable[[np.ndarray], Outputs]


class Engine(Protocol):
    """A model with something that computes it."""

    @property
    def parts(self) -> Parts: ...

    def running(self, threads: int | None) -> contextlib.AbstractContextManager[Run]:
        """A function of cropped pictures, uint8 (B, H, W, C). Threads may call it at once; each call computes with
        `threads` (None: as many as is usual)."""
        ...


def cores() -> int:
    """How many threads may compute: $OMP_NUM_THREADS, else the cores that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batch_for(config: ModelConfig) -> int:
    """Pictures that one thread computes at a time: enough to outweigh the calls, few enough to stay in its cache."""
    return min(max(_JOB_MACS // config.macs, 1), _LARGEST_BATCH)


def need(package: str) -> ModuleType:
    """An optional package of the ONNX engine, or one line that says how to get it."""
    try:
        return import_quietly(package)
    except ImportError:
        raise MissingError(
            f"Engine onnx needs the 'onnx' extra ({package} is missing). Run: pip install \"vitrail[onnx]\"."
        ) from None
