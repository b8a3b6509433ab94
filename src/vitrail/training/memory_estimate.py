"""Estimate the memory of a training step before the first step, by measuring a few blank images."""

import contextlib
import math
import os
import weakref
from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from vitrail.core.errors import OutOfMemoryError, VitrailError
from vitrail.core.memory import available_memory, describe_allocation_failure, format_bytes, is_allocation_failure
from vitrail.training.loop import Trainer
from vitrail.training.objectives.base import preserve_state
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import OPTIMISERS

_NEGLIGIBLE_SHARE = 0.05  # share of the available memory below which a run is not measured
# Numbers of images that are measured: BatchNorm needs two, and the difference is the memory per image.
_MEASURED_IMAGES = (2, 3)


class Footprint(NamedTuple):
    """Bytes of a training step, in addition to those allocated before the first step."""

    fixed: float
    """Bytes independent of the batch: gradients, optimiser state and tables."""
    image: float
    """Bytes of the activations of one image."""

    def bytes_for(self, images: int) -> float:
        """Return the bytes of a step that computes `images` images at a time."""
        return self.fixed + self.image * images

    def images_within(self, size: float) -> int:
        """Return the largest number of images at a time that fits into `size` bytes."""
        return max(math.floor((size - self.fixed) / self.image), 0)


class _MemoryExceeded(Exception):
    """Raised when tensors exceed the available memory during the measurement."""


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that operations allocate, except for `existing` tensors."""

    def __init__(self, existing: Any, limit: float) -> None:
        super().__init__()
        self._limit = limit
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.live = self.peak = 0
        self._counted.update(tensor.untyped_storage() for tensor in existing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it is freed. Raise `_MemoryExceeded` above the limit."""
        if storage in self._counted:
            return
        size = storage.nbytes()
        self._counted.add(storage)
        weakref.finalize(storage, self._release, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.live > self._limit:
            raise _MemoryExceeded

    def _release(self, size: int) -> None:
        self.live -= size


def check_memory(trainer: Trainer) -> None:
    """Raise OutOfMemoryError, with settings that would fit, if a training step does not fit into memory.

    Small runs are not measured, and neither are compiled models, whose kernels store less.
    """
    free = _available_bytes(trainer.ranks)
    if free is None or trainer.options.compile:
        return
    images = _images_at_a_time(trainer)
    state = _state_bytes(trainer)
    config = trainer.objective.model.config
    # In all families, the activations of an image have fewer bytes than its forward pass has multiply-adds.
    if state + config.macs * images < _NEGLIGIBLE_SHARE * free:
        is_short, footprint = False, None
    else:
        footprint = _measure_footprint(trainer, free, state)
        is_short = footprint is None or footprint.bytes_for(images) > free
    (is_short_anywhere,) = trainer.ranks.reduce_max(is_short)
    if is_short_anywhere:
        required = f"more than {format_bytes(free)}" if footprint is None else format_bytes(footprint.bytes_for(images))
        raise OutOfMemoryError(
            f"Batch must fit into memory: a step of {images:,} images at a time needs {required}, got"
            f" {format_bytes(free)} available. {_suggest_settings(trainer, free, state, footprint)}"
        )


@contextlib.contextmanager
def explain_shortage(trainer: Trainer) -> Generator[None]:
    """Context manager that converts a failed allocation in training into OutOfMemoryError with advice."""
    try:
        yield
    except VitrailError:
        raise
    except Exception as error:
        if not is_allocation_failure(error):
            raise
        images = _images_at_a_time(trainer)
        raise OutOfMemoryError(
            f"Memory ran out in a step of {images:,} images at a time: {describe_allocation_failure(error)}."
            f" Start a new run with --batch {max(trainer.recipe.batch // 2, 1)}, --set"
            f" accumulate={2 * trainer.recipe.accumulate} or --set activation_checkpointing=true, or with several of"
            " them."
        ) from None


def _images_at_a_time(trainer: Trainer, accumulate: int | None = None) -> int:
    """Return the number of images that one rank computes at a time."""
    rank_images = math.ceil(min(trainer.recipe.batch, len(trainer.loader.split)) / trainer.ranks.count)
    return math.ceil(rank_images / (accumulate or trainer.recipe.accumulate))


def _available_bytes(ranks: Ranks) -> float | None:
    """Return the bytes available on the device of a rank; None if torch cannot tell."""
    if ranks.device.type == "cpu":
        return available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1") if ranks.count > 1 else "1")
    try:
        free, _ = torch.accelerator.get_memory_info(ranks.device)
        cached = torch.accelerator.memory_reserved(ranks.device) - torch.accelerator.memory_allocated(ranks.device)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return free + cached


def _state_bytes(trainer: Trainer) -> float:
    """Return the bytes of the optimiser state, which the first step allocates."""
    roles, recipe = trainer.objective.roles(), trainer.recipe
    optimiser = OPTIMISERS[recipe.optimiser]()
    factors: dict[str, float] = {}
    total = 0.0
    for name, parameter in trainer.objective.named_parameters():
        if parameter.requires_grad:
            optimiser_name = recipe.optimiser if optimiser.takes(roles[name]) else optimiser.rest
            if optimiser_name not in factors:
                factors[optimiser_name] = _state_factor(optimiser_name, trainer)
            total += parameter.nbytes * factors[optimiser_name]
    return total


def _state_factor(name: str, trainer: Trainer) -> float:
    """Return how many numbers an optimiser stores per parameter, measured by a step with a small matrix."""
    matrix = torch.nn.Parameter(torch.zeros(4, 4, device=trainer.ranks.device))
    matrix.grad = torch.zeros_like(matrix)
    group = {"params": [matrix], "share": 1.0, "lr": 0.0, "weight_decay": 0.0, "parts": 1}
    optimiser = OPTIMISERS[name]().make([group], trainer.recipe)
    optimiser.step()
    values = [value for value in optimiser.state[matrix].values() if isinstance(value, Tensor)]
    return sum(value.numel() for value in values if value.shape == matrix.shape) / matrix.numel()


def _measure_footprint(trainer: Trainer, free: float, state: float) -> Footprint | None:
    """Measure the footprint of a step on blank images; None if even a few images do not fit."""
    try:
        fewer_images_peak, more_images_peak = (
            _measure_peak(trainer, count, free - state) for count in _MEASURED_IMAGES
        )
    except _MemoryExceeded:
        return None
    except Exception as error:
        if is_allocation_failure(error):
            return None
        raise
    fewer, more = _MEASURED_IMAGES
    image = (more_images_peak - fewer_images_peak) / (more - fewer)
    return Footprint(state + fewer_images_peak - image * fewer, max(image, 1.0))


def _measure_peak(trainer: Trainer, count: int, limit: float) -> int:
    """Return the peak bytes in use in a forward and backward pass of `count` blank images."""
    objective, device = trainer.objective, trainer.ranks.device
    with preserve_state(objective, device):
        counter = _LiveBytes([*objective.parameters(), *objective.buffers()], limit)
        with counter:
            with torch.autocast(device.type, torch.bfloat16, enabled=trainer.options.amp):
                losses = objective(*trainer.blank_batch(count), None, None)
            losses.sum().backward()
    return counter.peak


def _suggest_settings(trainer: Trainer, free: float, state: float, footprint: Footprint | None) -> str:
    """Return advice with settings with which the run would fit into nine tenths of the memory."""
    size, model = 0.9 * free, trainer.objective.model
    advice = [] if footprint is None else _suggest_smaller_batches(trainer, footprint, size)
    if not model.checkpoints_activations:
        model.checkpoints_activations = True
        lighter = _measure_footprint(trainer, free, state)
        model.checkpoints_activations = False
        if lighter is not None and (footprint is None or lighter.image < 0.9 * footprint.image):
            setting, images = "--set activation_checkpointing=true", _images_at_a_time(trainer)
            if lighter.bytes_for(images) <= size:
                advice.append(f"{setting} ({format_bytes(lighter.bytes_for(images))})")
            elif not advice and (settings := _suggest_smaller_batches(trainer, lighter, size)):
                advice.append(f"{setting} with {settings[0]}")
    return f"Use {' or '.join(advice)}." if advice else "Use a smaller model or a lower resolution."


def _suggest_smaller_batches(trainer: Trainer, footprint: Footprint, size: float) -> list[str]:
    """Return a batch size and an `accumulate` setting that fit; empty if not even one image fits."""
    recipe, max_images = trainer.recipe, footprint.images_within(size)
    if not max_images:
        return []
    batch = 2 ** int(math.log2(max_images * recipe.accumulate * trainer.ranks.count))
    accumulate = recipe.accumulate
    while _images_at_a_time(trainer, accumulate) > max_images:
        accumulate *= 2
    required = format_bytes(footprint.bytes_for(_images_at_a_time(trainer, accumulate)))
    return [f"--batch {batch}", f"--set accumulate={accumulate} ({required})"]
