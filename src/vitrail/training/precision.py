"""What training in bfloat16 gains or costs on this machine, by a measurement that leaves the run as it is."""

import contextlib
import statistics
import time

import torch

from vitrail.core.settings import pluralise
from vitrail.training.loop import Trainer
from vitrail.training.objectives.base import preserve_state

_STEPS = 3
_SECONDS = 0.1  # of one step in float32, at most: without bfloat16 in hardware one in bfloat16 takes 20 times as long


def describe_bfloat16_speed(trainer: Trainer) -> str:
    """Time a few steps of the run's own model and images both ways, and say which is faster."""
    with contextlib.closing(trainer.loader.epoch(0)) as batches:
        arguments, _ = next(trainer.split_batch(next(batches)))
    objective, device = trainer.objective, trainer.ranks.device

    def seconds(count: int, *, lower: bool) -> float:
        _wait(device)
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=lower):
            losses = objective(*(None if one is None else one[:count] for one in arguments))
        losses.sum().backward()
        _wait(device)
        return time.perf_counter() - began

    with preserve_state(objective, device):
        count = min(len(arguments[0]), 2)  # BatchNorm needs two
        seconds(count, lower=False)  # warms up
        while count < len(arguments[0]) and seconds(count, lower=False) < _SECONDS / 2:
            count = min(2 * count, len(arguments[0]))
        times = {}
        for lower in (False, True):
            first = seconds(count, lower=lower)  # warms up, unless it says enough
            is_slow = first > 10 * _SECONDS
            times[lower] = first if is_slow else statistics.median(seconds(count, lower=lower) for _ in range(_STEPS))
    gain = times[False] / times[True]
    faster = f"{gain:.1f}x as fast as" if gain >= 1 else f"{1 / gain:.1f}x slower than"
    advice = "" if gain >= 1 else "; leave --precision out for float32"
    images = pluralise(count, "image")
    return f"a step in bfloat16 is {faster} in float32 on this machine (measured on {images}){advice}"


def _wait(device: torch.device) -> None:
    """Wait until the device has computed what was asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
