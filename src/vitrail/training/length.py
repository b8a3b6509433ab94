"""The number of steps of a run. With a time limit, it is computed from the measured time of a step."""

import statistics
import time
from typing import TYPE_CHECKING

from vitrail.core.settings import pluralise
from vitrail.evaluation.history import LINEAR_HEAD
from vitrail.training.average import WeightAverage
from vitrail.training.optimisers.base import make_optimisers
from vitrail.training.starting_point import StartingPoint

if TYPE_CHECKING:
    from vitrail.training.loop import Trainer

_MEASURED_SECONDS, _MEASURED_STEPS, _WARM_STEPS = 4.0, 40, 3


def measure_steps(trainer: "Trainer", seconds: float) -> int:
    """Return the number of steps that fit into `seconds`, including evaluations.

    A few steps are timed; afterwards, weights, optimisers and the running average are reset.
    """
    initial_weights = {name: tensor.clone() for name, tensor in trainer.objective.state_dict().items()}
    trainer.total = 1
    times: list[float] = []
    start = last = time.perf_counter()
    for batch in trainer.loader.epoch(0):
        trainer.update(batch)
        now = time.perf_counter()
        times.append(now - last)
        last = now
        # The first steps warm up and compile. All ranks must stop at the same step.
        (spent,) = trainer.ranks.reduce_max(sum(times[_WARM_STEPS:]))
        if spent > _MEASURED_SECONDS or len(times) >= _MEASURED_STEPS:
            break
    step_seconds = statistics.median(times[_WARM_STEPS:] or times)
    trainer.objective.load_state_dict(initial_weights)
    trainer.optimisers = make_optimisers(trainer.objective, trainer.recipe)
    if trainer.average:
        trainer.average = WeightAverage(trainer.objective, trainer.recipe.average)
    evaluation_seconds = 0.0  # per step
    if trainer.held_out_loader is not None:
        # A forward pass is about a third of a step.
        batches = len(trainer.held_out_loader.split) / trainer.recipe.batch
        evaluation_seconds = batches * step_seconds / 3 / (trainer.loader.steps * trainer.recipe.evaluate_every)
    slowest, spent = trainer.ranks.reduce_max(step_seconds + evaluation_seconds, last - start)
    return max(int(0.95 * max(seconds - spent, 0) / slowest), 1)


def plan_steps(trainer: "Trainer", starting_point: StartingPoint, start: float) -> tuple[int, str | None]:
    """Return the number of steps of a run, and a note if too few steps fit into its time limit to train at all.

    `start` is the monotonic time at which the run started; the time since then counts towards the limit.
    """
    recipe = trainer.recipe
    if trainer.planned_steps is not None:
        return trainer.planned_steps, None
    minutes = recipe.minutes or 0.0
    steps = int(trainer.ranks.broadcast(measure_steps(trainer, 60 * minutes - (time.monotonic() - start))))
    if starting_point.probe is None or steps >= recipe.least_steps:
        return steps, None
    return 0, (
        f"only {pluralise(steps, 'step')} would fit into {pluralise(minutes, 'minute')}, fewer than the"
        f" {recipe.least_steps} of least_steps: the {LINEAR_HEAD} is kept without training (allow more minutes or"
        " use a lower resolution to train)"
    )
