"""Measure whether training in bfloat16 is faster than in float32 on this machine, without changing the run."""

import contextlib
import statistics
import time

import torch

from vitrail.core.settings import pluralise
from vitrail.training.loop import Trainer
from vitrail.training.objectives.base import preserve_state

_REPETITIONS = 3
# Maximum duration of a timed float32 step. Without hardware support, a step in bfloat16 takes 20 times as long.
_MAX_STEP_SECONDS = 0.1


def describe_bfloat16_speed(trainer: Trainer) -> str:
    """Time a few steps of the run's model in both precisions, and return a note that says which is faster.

    Weights, gradients, running statistics and random numbers are left as they were.
    """
    with contextlib.closing(trainer.loader.epoch(0)) as batches:
        arguments, _ = next(trainer.split_batch(next(batches)))
    objective, device = trainer.objective, trainer.ranks.device

    def time_step(count: int, *, is_bfloat16: bool) -> float:
        _wait_for_device(device)
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16):
            losses = objective(*(None if tensor is None else tensor[:count] for tensor in arguments))
        losses.sum().backward()
        _wait_for_device(device)
        return time.perf_counter() - start

    with preserve_state(objective, device):
        count = min(len(arguments[0]), 2)  # BatchNorm needs two
        time_step(count, is_bfloat16=False)  # warm-up
        while count < len(arguments[0]) and time_step(count, is_bfloat16=False) < _MAX_STEP_SECONDS / 2:
            count = min(2 * count, len(arguments[0]))
        times = {}
        for is_bfloat16 in (False, True):
            first = time_step(count, is_bfloat16=is_bfloat16)  # a warm-up; of a slow step, also the result
            times[is_bfloat16] = first
            if first <= 10 * _MAX_STEP_SECONDS:
                times[is_bfloat16] = statistics.median(
                    time_step(count, is_bfloat16=is_bfloat16) for _ in range(_REPETITIONS)
                )
    gain = times[False] / times[True]
    comparison = f"{gain:.1f}x as fast as" if gain >= 1 else f"{1 / gain:.1f}x slower than"
    advice = "" if gain >= 1 else "; omit --precision to train in float32"
    images = pluralise(count, "image")
    return f"a step in bfloat16 is {comparison} in float32 on this machine (measured on {images}){advice}"


def _wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has finished its queued operations."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
