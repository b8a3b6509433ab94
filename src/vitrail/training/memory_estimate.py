"""Memory of a training step, measured before the first one on a few blank images."""

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

_TINY = 0.05  # share of the available memory; runs that are estimated below it are not measured
_MEASURED = (2, 3)  # images: batch normalisation needs two, and a difference tells fixed from per-image memory


class Footprint(NamedTuple):
    """Bytes of a step in addition to what is allocated before the first one."""

    fixed: float
    """Gradients, the optimisers' state and tables: independent of the batch."""
    image: float
    """Activations of one image."""

    def of(self, images: int) -> float:
        """Bytes of a step that computes this many images at a time."""
        return self.fixed + self.image * images

    def images_within(self, size: float) -> int:
        """The largest number of images at a time."""
        return max(math.floor((size - self.fixed) / self.image), 0)


class _TooLarge(Exception):
    """More than the available memory was allocated."""


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations allocate, while they are in use."""

    def __init__(self, before: Any, limit: float) -> None:
        super().__init__()
        self._limit = limit
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.live = self.peak = 0
        self._counted.update(tensor.untyped_storage() for tensor in before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._counted:
            return
        size = storage.nbytes()
        self._counted.add(storage)
        weakref.finalize(storage, self._release, size)
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.live > self._limit:
            raise _TooLarge

    def _release(self, size: int) -> None:
        self.live -= size


def check_memory(trainer: Trainer) -> None:
    """Refuse a run whose first step cannot fit into memory, and say what would. Small runs are not measured, nor are
    compiled models, whose kernels store less."""
    free = _free(trainer.ranks)
    if free is None or trainer.options.compile:
        return
    images = _images_at_a_time(trainer)
    state = _state_bytes(trainer)
    config = trainer.objective.model.config
    # In all families an image's activations take fewer bytes than it takes multiply-accumulates.
    if state + config.macs * images < _TINY * free:
        is_short, footprint = False, None
    else:
        footprint = _measure(trainer, free, state)
        is_short = footprint is None or footprint.of(images) > free
    (agreed,) = trainer.ranks.reduce_max(is_short)
    if agreed:
        need = f"more than {format_bytes(free)}" if footprint is None else format_bytes(footprint.of(images))
        raise OutOfMemoryError(
            f"Batch must fit into memory: a step of {images:,} images at a time needs {need}, got {format_bytes(free)}"
            f" available. {_advise(trainer, free, state, footprint)}"
        )


@contextlib.contextmanager
def explain_shortage(trainer: Trainer) -> Generator[None]:
    """Turn a failed allocation in training into an error that says what to change."""
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
            f" accumulate={2 * trainer.recipe.accumulate} or --set activation_checkpointing=true."
        ) from None


def _images_at_a_time(trainer: Trainer, accumulate: int | None = None) -> int:
    """Images that one rank computes at a time."""
    of_rank = math.ceil(min(trainer.recipe.batch, len(trainer.loader.split)) / trainer.ranks.count)
    return math.ceil(of_rank / (accumulate or trainer.recipe.accumulate))


def _free(ranks: Ranks) -> float | None:
    """Available bytes on the device of a rank; None where torch does not say."""
    if ranks.device.type == "cpu":
        return available_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", "1") if ranks.count > 1 else "1")
    try:
        free, _ = torch.accelerator.get_memory_info(ranks.device)
        cached = torch.accelerator.memory_reserved(ranks.device) - torch.accelerator.memory_allocated(ranks.device)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    return free + cached


def _state_bytes(trainer: Trainer) -> float:
    """Bytes of the optimisers' state, which the first step allocates: found by a step of one small matrix each."""
    roles, recipe = trainer.objective.roles(), trainer.recipe
    chosen = OPTIMISERS[recipe.optimiser]()
    factors: dict[str, float] = {}
    total = 0.0
    for name, parameter in trainer.objective.named_parameters():
        if parameter.requires_grad:
            kind = recipe.optimiser if chosen.takes(roles[name]) else chosen.rest
            if kind not in factors:
                factors[kind] = _state_factor(kind, trainer)
            total += parameter.nbytes * factors[kind]
    return total


def _state_factor(name: str, trainer: Trainer) -> float:
    """Numbers that an optimiser keeps for each parameter."""
    matrix = torch.nn.Parameter(torch.zeros(4, 4, device=trainer.ranks.device))
    matrix.grad = torch.zeros_like(matrix)
    group = {"params": [matrix], "share": 1.0, "lr": 0.0, "weight_decay": 0.0, "parts": 1}
    optimiser = OPTIMISERS[name]().make([group], trainer.recipe)
    optimiser.step()
    values = [value for value in optimiser.state[matrix].values() if isinstance(value, Tensor)]
    return sum(value.numel() for value in values if value.shape == matrix.shape) / matrix.numel()


def _measure(trainer: Trainer, free: float, state: float) -> Footprint | None:
    """The footprint of a step; None if even a few images do not fit."""
    try:
        few, more = (_peak(trainer, count, free - state) for count in _MEASURED)
    except _TooLarge:
        return None
    except Exception as error:
        if is_allocation_failure(error):
            return None
        raise
    image = (more - few) / (_MEASURED[1] - _MEASURED[0])
    return Footprint(state + few - image * _MEASURED[0], max(image, 1.0))


def _peak(trainer: Trainer, count: int, limit: float) -> int:
    """The most bytes in use in a forward and backward pass of blank images."""
    objective, device = trainer.objective, trainer.ranks.device
    with preserve_state(objective, device):
        counter = _LiveBytes([*objective.parameters(), *objective.buffers()], limit)
        with counter:
            with torch.autocast(device.type, torch.bfloat16, enabled=trainer.options.amp):
                losses = objective(*trainer.blank_batch(count), None, None)
            losses.sum().backward()
    return counter.peak


def _advise(trainer: Trainer, free: float, state: float, footprint: Footprint | None) -> str:
    """The settings with which the run would fit, with a tenth of the memory to spare."""
    size, model = 0.9 * free, trainer.objective.model
    advice = [] if footprint is None else _smaller_batches(trainer, footprint, size)
    if not model.checkpoints_activations:
        model.checkpoints_activations = True
        lighter = _measure(trainer, free, state)
        model.checkpoints_activations = False
        if lighter is not None and (footprint is None or lighter.image < 0.9 * footprint.image):
            setting, images = "--set activation_checkpointing=true", _images_at_a_time(trainer)
            if lighter.of(images) <= size:
                advice.append(f"{setting} ({format_bytes(lighter.of(images))})")
            elif not advice and (settings := _smaller_batches(trainer, lighter, size)):
                advice.append(f"{setting} with {settings[0]}")
    return f"Use {' or '.join(advice)}." if advice else "Use a smaller model or a lower resolution."


def _smaller_batches(trainer: Trainer, footprint: Footprint, size: float) -> list[str]:
    """A batch that fits, and a number of parts in which the present one does; empty if not even one image fits."""
    recipe, most = trainer.recipe, footprint.images_within(size)
    if not most:
        return []
    batch = 2 ** int(math.log2(most * recipe.accumulate * trainer.ranks.count))
    accumulate = recipe.accumulate
    while _images_at_a_time(trainer, accumulate) > most:
        accumulate *= 2
    needs = format_bytes(footprint.of(_images_at_a_time(trainer, accumulate)))
    return [f"--batch {batch}", f"--set accumulate={accumulate} ({needs})"]
