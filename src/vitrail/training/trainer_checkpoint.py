"""Save a trainer to a checkpoint and restore it. The tensors of a checkpoint are named

now/NAME             current weights and buffers of the objective
average/NAME         running average of the weights
start/NAME           the head of the starting point, if the run may return to it
best/NAME            the best weights so far, with patience
memory/NAME/ENTRY    state of the optimiser for a parameter
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.training.checkpoint import Checkpoint, list_steps, remove_old_checkpoints, save_checkpoint
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import with_defaults

if TYPE_CHECKING:
    from vitrail.training.loop import Trainer


def collect_arrays(trainer: "Trainer") -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint as arrays, by name."""
    return {name: tensor.detach().cpu().numpy() for name, tensor in _collect_tensors(trainer).items()}


def _collect_tensors(trainer: "Trainer") -> dict[str, Tensor]:
    tensors = {f"now/{name}": tensor for name, tensor in trainer.objective.state_dict().items()}
    if trainer.average:
        tensors |= {f"average/{name}": tensor for name, tensor in trainer.average.model.state_dict().items()}
    tensors |= {f"start/{name}": tensor for name, tensor in trainer.starting_head.items()}
    tensors |= {f"best/{name}": tensor for name, tensor in trainer.best_weights.items()}
    return tensors | {f"memory/{name}/{entry}": tensor for name, entry, tensor in _optimiser_state(trainer)}


def _optimiser_state(trainer: "Trainer") -> Iterator[tuple[str, str, Tensor]]:
    """Yield each tensor of the optimisers' state with the names of its parameter and its entry."""
    names = {id(parameter): name for name, parameter in trainer.objective.named_parameters()}
    for optimiser in trainer.optimisers:
        for parameter, entries in optimiser.state.items():
            for entry, tensor in entries.items():
                if not isinstance(tensor, Tensor) or id(parameter) not in names:
                    raise VitrailError(
                        f"State of an optimiser must be tensors of parameters, got {entry} of type"
                        f" {type(tensor).__name__} from {type(optimiser).__name__}. A checkpoint cannot store it."
                    )
                yield names[id(parameter)], entry, tensor


def save_trainer(
    trainer: "Trainer", checkpoints: Path, state: dict[str, Any], log: RunLog, *, required: bool = False
) -> None:
    """Write a checkpoint of the current step with the additional fields `state`, and remove old checkpoints.

    All ranks take part and the first one writes. A failure is only a warning unless `required`.
    """
    losses = [sum(parts) for parts in zip(*trainer.ranks.gather(list(trainer.recent_losses)), strict=True)]
    if not trainer.ranks.is_first:
        return
    arrays = collect_arrays(trainer)
    state = {
        **state,
        "step": trainer.step,
        "total": trainer.total,
        "best": trainer.best,
        "latest": None if trainer.latest is None else _with_null(trainer.latest),
        "damaged": trainer.damaged,
        "left_out": trainer.skipped_steps,
        "seconds": round(trainer.elapsed_seconds, 1),
        "start": trainer.starting_scores,
        "rate_scale": trainer.rate_scale,
        "waited": trainer.evaluations_since_best,
        "stopped": trainer.stopped,
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
    }
    trainer.mark_saved()
    try:
        save_checkpoint(checkpoints, trainer.step, arrays, state)
    except VitrailError as error:
        if required:
            raise
        log.say(f"warning: {error} Training continues; {_describe_newest(checkpoints)}.")
        log.write("checkpoint-failed", step=trainer.step, reason=str(error))
        return
    best_step = trainer.best["step"] if trainer.best else None
    remove_old_checkpoints(checkpoints, keep=trainer.options.keep, best=best_step)


def _describe_newest(checkpoints: Path) -> str:
    steps = list_steps(checkpoints)
    return f"the last intact checkpoint is of step {steps[-1]}" if steps else "no checkpoint exists yet"


def restore_trainer(trainer: "Trainer", checkpoint: Checkpoint) -> None:
    """Restore weights, optimisers and progress from a checkpoint.

    Values are copied into tensors that torch and the optimiser allocated. Their alignment, on which the last bits of a
    sum depend, is then that of an uninterrupted run.
    """
    state = with_defaults(checkpoint.state)
    _allocate_tensors(trainer, checkpoint.step, state)
    tensors, arrays = _collect_tensors(trainer), checkpoint.arrays
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if mismatches := {*shapes.items()} ^ {(name, array.shape) for name, array in arrays.items()}:
        name = min(mismatches)[0]
        raise CorruptFileError(f"Checkpoint must have the tensors of this run, got different tensors, such as {name}.")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))
    trainer.step, trainer.total, trainer.seconds = checkpoint.step, state["total"], state["seconds"]
    trainer.best, trainer.damaged, trainer.skipped_steps = state["best"], dict(state["damaged"]), state["left_out"]
    trainer.evaluations_since_best, trainer.stopped = state["waited"], state["stopped"]
    trainer.starting_scores, trainer.rate_scale = state["start"], state["rate_scale"]
    trainer.latest = None if state["latest"] is None else _with_nan(state["latest"])
    # Stored losses are sums over all ranks: the first rank takes them, and the other ranks take 0.
    parts = (math.nan if loss is None else loss * trainer.ranks.is_first for loss in state["losses"])
    trainer.recent_losses.extend(parts)


def _allocate_tensors(trainer: "Trainer", step: int, state: dict[str, Any]) -> None:
    """Allocate the tensors of a checkpoint that a new trainer does not have. This changes the weights."""
    trainer.best_weights = trainer.clone_kept_weights() if trainer.recipe.patience and state["best"] is not None else {}
    trainer.starting_head = trainer.clone_head() if state["start"] is not None else {}
    if state["left_out"] == step:  # no step has updated weights, so the optimisers have no state
        for optimiser in trainer.optimisers:
            optimiser.state.clear()
    elif not any(True for _ in _optimiser_state(trainer)):
        _allocate_optimiser_state(trainer)


def _allocate_optimiser_state(trainer: "Trainer") -> None:
    """Make a step with zero gradients, in which the optimisers allocate their state. This changes the weights."""
    trainer.objective.train()
    (trainer.objective(*trainer.blank_batch(), None, None).sum() * 0).backward()
    for optimiser in trainer.optimisers:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


def _with_null(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite by None, for JSON."""
    return {name: number if math.isfinite(number) else None for name, number in evaluation.items()}


def _with_nan(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Replace None by NaN, the reverse of `_with_null`."""
    return {name: math.nan if number is None else number for name, number in evaluation.items()}
