"""The state of a run: weights, their average, the optimisers' state, the step; to and from checkpoints."""

import collections
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.data.cache import ImageCache
from vitrail.data.dataset import Split
from vitrail.data.loader import Loader
from vitrail.data.preprocess import Preprocess
from vitrail.models.base import AnyModel
from vitrail.training.average import WeightAverage
from vitrail.training.checkpoint import Checkpoint, list_steps, remove_old_checkpoints, save_checkpoint
from vitrail.training.objectives.base import Objective, Task, make_objective
from vitrail.training.observer import RunProgress
from vitrail.training.optimisers.base import make_optimisers
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import Recipe
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import StopReason, with_defaults

LOG_EVERY = 10
"""Steps between events of the log; a logged loss is the mean of as many."""


class TrainerState:
    """All that a run consists of while it trains, without the loop (`training.loop.Trainer`)."""

    def __init__(
        self,
        model: AnyModel,
        preprocess: Preprocess,
        training: Split,
        held_out: Split | None,
        recipe: Recipe,
        options: Options,
        ranks: Ranks,
        *,
        labels: tuple[str, ...] = (),
        learned: dict[str, Tensor] | None = None,
        cache: ImageCache | None = None,
    ) -> None:
        self.preprocess, self.recipe, self.options, self.ranks = preprocess, recipe, options, ranks
        objective = make_objective(model, Task(recipe, preprocess, labels))
        objective.load_state_dict({**objective.state_dict(), **(learned or {})})
        self.objective = objective.to(ranks.device)
        if recipe.freeze:
            self.objective.freeze()
        model.checkpoints_activations = recipe.activation_checkpointing
        self.optimisers = make_optimisers(self.objective, recipe)
        self.average = WeightAverage(self.objective, recipe.average) if recipe.average else None
        self._cache = cache
        self.loader = self._load(
            training, batch=recipe.batch, settings=recipe.augment, shuffle=True, on_damage=recipe.on_damage
        )
        self.held_out_loader = self.evaluation_loader(held_out) if held_out is not None else None
        self.step, self.total, self.seconds = 0, self.planned_steps or 0, 0.0
        self.rate_scale = 1.0
        self.best: dict[str, Any] | None = None
        self._best_state: dict[str, Tensor] = {}
        self.evaluations_since_best = 0
        self.stopped: StopReason | None = None
        self.initial_scores: dict[str, Any] | None = None
        self._initial_head: dict[str, Tensor] = {}
        self.damaged: dict[str, str] = {}
        self.skipped_steps = 0
        self.latest: dict[str, Any] | None = None
        self.gradients: list[float] = []
        self._losses: collections.deque[float] = collections.deque(maxlen=LOG_EVERY)
        self.began = self._saved = time.monotonic()
        self._runner: Any = self.objective
        if options.compile:
            self._runner = torch.compile(self._runner)
        if ranks.count > 1:
            self._runner = DistributedDataParallel(self._runner)

    def _load(self, split: Split, **settings: Any) -> Loader:
        return Loader(
            split,
            self.preprocess,
            seed=self.options.seed,
            workers=self.options.workers,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
            cache=self._cache,
            **settings,
        )

    def evaluation_loader(self, split: Split) -> Loader:
        """A loader of each image of a split once, in order. Damaged images are skipped, never substituted."""
        on_damage = "error" if self.recipe.on_damage == "error" else "skip"
        return self._load(split, batch=max(self.recipe.batch, 64), shuffle=False, on_damage=on_damage)

    @property
    def planned_steps(self) -> int | None:
        """Number of steps, unless the recipe has a time limit."""
        if self.recipe.epochs is None:
            return self.recipe.steps
        return max(self.recipe.epochs, self._least_epochs) * self.loader.steps

    @property
    def _least_epochs(self) -> int:
        """Epochs that it takes to see the recipe's least images."""
        return math.ceil(self.recipe.least_images / len(self.loader.split))

    @property
    def _evaluate_every(self) -> int:
        """Epochs between evaluations: where few images take more epochs, there are not more evaluations."""
        stretch = math.ceil(self._least_epochs / (self.recipe.epochs or 1))
        return self.recipe.evaluate_every * max(stretch, 1)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of the run so far, including those before interruptions."""
        return self.seconds + time.monotonic() - self.began

    @property
    def progress(self) -> RunProgress:
        """How far the run has come."""
        return RunProgress(self.step, self.total, self.elapsed_seconds)

    # The state, to and from arrays

    def arrays(self) -> dict[str, np.ndarray]:
        """All tensors of the run's state, by name."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self._tensors().items()}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint. Values are copied into tensors that torch and the optimiser allocated, so that their
        alignment, on which the last bits depend, is that of an uninterrupted run."""
        state = with_defaults(checkpoint.state)
        self._make_room(checkpoint.step, state)
        tensors, arrays = self._tensors(), checkpoint.arrays
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if different := {*shapes.items()} ^ {(name, array.shape) for name, array in arrays.items()}:
            name = min(different)[0]
            raise CorruptFileError(f"Checkpoint must have the tensors of this run, got others, such as {name}.")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(torch.from_numpy(arrays[name]))
        self.step, self.total, self.seconds = checkpoint.step, state["total"], state["seconds"]
        self.best, self.damaged, self.skipped_steps = state["best"], dict(state["damaged"]), state["left_out"]
        self.evaluations_since_best, self.stopped = state["waited"], state["stopped"]
        self.initial_scores = state["start"]
        self.rate_scale = state["rate_scale"]
        self.latest = None if state["latest"] is None else _with_nan(state["latest"])
        # They are sums over all ranks.
        parts = (math.nan if loss is None else loss * self.ranks.is_first for loss in state["losses"])
        self._losses.extend(parts)

    def _make_room(self, step: int, state: dict[str, Any]) -> None:
        """Allocate every tensor that the checkpoint fills: the optimisers' state, the initial head, the best weights.
        This changes the weights."""
        self._best_state = self._clone_kept() if self.recipe.patience and state["best"] is not None else {}
        self._initial_head = self._clone_head() if state["start"] is not None else {}
        if state["left_out"] == step:
            for optimiser in self.optimisers:
                optimiser.state.clear()
        elif not any(True for _ in self._memory()):
            self._make_memory()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"now/{name}": tensor for name, tensor in self.objective.state_dict().items()}
        if self.average:
            tensors |= {f"average/{name}": tensor for name, tensor in self.average.model.state_dict().items()}
        tensors |= {f"start/{name}": tensor for name, tensor in self._initial_head.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self._best_state.items()}
        return tensors | {f"memory/{name}/{entry}": tensor for name, entry, tensor in self._memory()}

    def _memory(self) -> Iterator[tuple[str, str, Tensor]]:
        """The optimisers' state: the name of a parameter, that of the entry, and its tensor."""
        names = {id(parameter): name for name, parameter in self.objective.named_parameters()}
        for optimiser in self.optimisers:
            for parameter, entries in optimiser.state.items():
                for entry, value in entries.items():
                    if not isinstance(value, Tensor) or id(parameter) not in names:
                        raise VitrailError(
                            f"State of an optimiser must be tensors of parameters, got {entry} of type"
                            f" {type(value).__name__} from {type(optimiser).__name__}: a checkpoint cannot keep it."
                        )
                    yield names[id(parameter)], entry, value

    def _make_memory(self) -> None:
        """Let the optimisers allocate their state, by a step with zero gradients. This changes the weights."""
        self.objective.train()
        blank = self.blank_batch()
        (self.objective(*blank, None, None).sum() * 0).backward()
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def blank_batch(self, count: int = 2) -> tuple[Tensor, Tensor]:
        """Blank images (batch normalisation needs two) with arbitrary labels."""
        shape, device = (count, self.preprocess.channels, *self.preprocess.resolution), self.ranks.device
        label = torch.from_numpy(self.loader.split.labels[:1])
        return torch.zeros(shape, device=device), label.new_zeros((count, *label.shape[1:]), device=device)

    @property
    def kept_model(self) -> AnyModel:
        """The model that is evaluated and saved: the average if there is one, otherwise the current weights."""
        return self.kept_objective.model

    @property
    def kept_objective(self) -> Objective:
        """The objective of the kept model."""
        return self.average.model if self.average else self.objective  # ty: ignore[invalid-return-type]

    def save(self, checkpoints: Path, state: dict[str, Any], log: RunLog, *, must: bool = False) -> None:
        """Save a checkpoint. A full disk does not end the run; older checkpoints are kept."""
        losses = [sum(parts) for parts in zip(*self.ranks.gather(list(self._losses)), strict=True)]
        if not self.ranks.is_first:
            return
        arrays = self.arrays()
        state = {
            **state,
            "step": self.step,
            "total": self.total,
            "best": self.best,
            "latest": None if self.latest is None else _with_null(self.latest),
            "damaged": self.damaged,
            "left_out": self.skipped_steps,
            "seconds": round(self.elapsed_seconds, 1),
            "start": self.initial_scores,
            "rate_scale": self.rate_scale,
            "waited": self.evaluations_since_best,
            "stopped": self.stopped,
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
        }
        self._saved = time.monotonic()
        try:
            save_checkpoint(checkpoints, self.step, arrays, state)
        except VitrailError as error:
            if must:
                raise
            log.say(f"warning: {error} Training goes on; {_last(checkpoints)}.")
            log.write("checkpoint-failed", step=self.step, reason=str(error))
            return
        remove_old_checkpoints(checkpoints, keep=self.options.keep, best=self.best["step"] if self.best else None)

    # The model to keep: the initial one, the best one or the last one

    def restore_starting_point(self, body: AnyModel) -> None:
        """Replace the kept model by the initial one: `body` with the initial head."""
        self.kept_model.load_state_dict({**body.state_dict(), **self._initial_head})

    def restore_best(self) -> bool:
        """With patience, replace the kept model by the one that was best on the held-out images. Returns whether there
        is one."""
        if not self._best_state or self.best is None:
            return False
        self.kept_objective.load_state_dict(self._best_state)
        self.latest = {name: number for name, number in self.best.items() if name != "step"}
        return True

    def _clone_kept(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.kept_objective.state_dict().items()}

    def _clone_head(self) -> dict[str, Tensor]:
        tensors = self.objective.model.state_dict()
        return {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("head.")}


def _with_null(found: dict[str, Any]) -> dict[str, Any]:
    """An evaluation for JSON, with None for numbers that are not finite."""
    return {name: number if math.isfinite(number) else None for name, number in found.items()}


def _with_nan(found: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_with_null`."""
    return {name: math.nan if number is None else number for name, number in found.items()}


def _last(checkpoints: Path) -> str:
    steps = list_steps(checkpoints)
    return f"the last intact checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint yet"
