"""The number of steps of a run; with a time limit, from the time of its first steps."""

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
    """Number of steps that fit into these seconds, including evaluations. Some steps are timed and then undone."""
    first = {name: tensor.clone() for name, tensor in trainer.objective.state_dict().items()}
    trainer.total = 1
    times: list[float] = []
    began = last = time.perf_counter()
    for batch in trainer.loader.epoch(0):
        trainer.update(batch)
        now = time.perf_counter()
        times.append(now - last)
        last = now
        # The first ones warm up, and compile. All ranks stop at the same step.
        (spent,) = trainer.ranks.reduce_max(sum(times[_WARM_STEPS:]))
        if spent > _MEASURED_SECONDS or len(times) >= _MEASURED_STEPS:
            break
    usual = statistics.median(times[_WARM_STEPS:] or times)
    trainer.objective.load_state_dict(first)
    trainer.optimisers = make_optimisers(trainer.objective, trainer.recipe)
    if trainer.average:
        trainer.average = WeightAverage(trainer.objective, trainer.recipe.average)
    between = 0.0
    if trainer.held_out_loader is not None:
        # A forward pass is about a third of a step.
        images = len(trainer.held_out_loader.split) / trainer.recipe.batch
        between = images * usual / 3 / (trainer.loader.steps * trainer.recipe.evaluate_every)
    slowest, spent = trainer.ranks.reduce_max(usual + between, last - began)
    return max(int(0.95 * max(seconds - spent, 0) / slowest), 1)


def plan_steps(trainer: "Trainer", initial: StartingPoint, began: float) -> tuple[int, str | None]:
    """Number of steps of a run, and a note if there are too few to train."""
    recipe = trainer.recipe
    if trainer.planned_steps is not None:
        return trainer.planned_steps, None
    minutes = recipe.minutes or 0.0
    steps = int(trainer.ranks.broadcast(measure_steps(trainer, 60 * minutes - (time.monotonic() - began))))
    if initial.probe is None or steps >= recipe.least_steps:
        return steps, None
    return 0, (
        f"{pluralise(steps, 'step')} would fit into {pluralise(minutes, 'minute')}; below {recipe.least_steps},"
        f" the {LINEAR_HEAD} is kept as it is (more minutes, or a lower resolution, change that)"
    )
