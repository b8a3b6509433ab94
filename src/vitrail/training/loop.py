"""The training loop: one for every family, objective and number of ranks.

A step is a pure function of the weights before it and of (seed, step): samples and augmentation come from
`data.loader`, and torch's generator for dropout is seeded at every step. So a run that was killed and resumed ends with
the same bits as one that was not, on one machine with the same number of threads.
"""

import collections
import contextlib
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from vitrail.core import rng
from vitrail.core.errors import DamagedError, VitrailError
from vitrail.core.settings import counted
from vitrail.data.augment.pipeline import mix
from vitrail.data.cache import ImageCache
from vitrail.data.dataset import Split
from vitrail.data.loader import Batch, Loader
from vitrail.data.preprocess import Preprocess
from vitrail.models.base import AnyModel
from vitrail.training.average import Average
from vitrail.training.callback import Callback, Step, asks_to_stop
from vitrail.training.checkpoint import Checkpoint, save_checkpoint, steps_of, tidy
from vitrail.training.objectives.base import Objective, Task, make_objective
from vitrail.training.optimisers.base import make_optimisers, set_learning_rate
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import Recipe
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import Ending, with_defaults
from vitrail.training.schedule import schedule
from vitrail.training.stop import Interrupted, Stop

_LOG_EVERY = 10  # steps; a logged loss is the mean of as many
_MEASURED_SECONDS, _MEASURED_STEPS, _WARM_STEPS = 4.0, 40, 3


class Done(NamedTuple):
    """Result of one step, agreed by all ranks."""

    loss: float
    """This rank's part of the loss."""
    is_finite: bool
    """Whether loss and gradient were finite on all ranks; otherwise the step was skipped."""
    signal: int
    """The signal that some rank received, or 0."""
    is_due: bool
    """Whether a checkpoint is due."""


class Trainer:
    """The state of a run: weights, their average, the optimisers' state, and the step."""

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
        self.average = Average(self.objective, recipe.average) if recipe.average else None
        self._cache = cache
        self.loader = self._load(
            training, batch=recipe.batch, settings=recipe.augment, shuffle=True, on_damage=recipe.on_damage
        )
        self.watch = self.load_to_evaluate(held_out) if held_out is not None else None
        self.step, self.total, self.seconds = 0, 0, 0.0
        self.rate_scale = 1.0
        self.best: dict[str, Any] | None = None
        self._best_state: dict[str, Tensor] = {}
        self.waited = 0
        self.stopped: Ending | None = None
        self.initial_scores: dict[str, Any] | None = None
        self._initial_head: dict[str, Tensor] = {}
        self.damaged: dict[str, str] = {}
        self.left_out = 0
        self.latest: dict[str, Any] | None = None
        self.gradients: list[float] = []
        self._losses: collections.deque[float] = collections.deque(maxlen=_LOG_EVERY)
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

    def load_to_evaluate(self, split: Split) -> Loader:
        """A loader of each image of a split once, in order. Damaged images are skipped, never substituted."""
        on_damage = "error" if self.recipe.on_damage == "error" else "skip"
        return self._load(split, batch=max(self.recipe.batch, 64), shuffle=False, on_damage=on_damage)

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
            raise DamagedError(f"Checkpoint must have the tensors of this run, got others, such as {name}.")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(torch.from_numpy(arrays[name]))
        self.step, self.total, self.seconds = checkpoint.step, state["total"], state["seconds"]
        self.best, self.damaged, self.left_out = state["best"], dict(state["damaged"]), state["left_out"]
        self.initial_scores, self.waited, self.stopped = state["start"], state["waited"], state["stopped"]
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
        blank = self.blank()
        (self.objective(*blank, None, None).sum() * 0).backward()
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def blank(self, count: int = 2) -> tuple[Tensor, Tensor]:
        """Blank images (batch normalisation needs two) with arbitrary labels."""
        shape, device = (count, self.preprocess.channels, *self.preprocess.resolution), self.ranks.device
        label = torch.from_numpy(self.loader.split.labels[:1])
        return torch.zeros(shape, device=device), label.new_zeros((count, *label.shape[1:]), device=device)

    @property
    def kept(self) -> AnyModel:
        """The model that is evaluated and saved: the average if there is one, otherwise the current weights."""
        return self.kept_objective.model

    @property
    def kept_objective(self) -> Objective:
        """The objective of the kept model."""
        return self.average.model if self.average else self.objective  # ty: ignore[invalid-return-type]

    # The choice between the model as it began and what training made of it

    def remember_initial(self) -> None:
        """Evaluate the initial model with its head from least squares, and keep that head in every checkpoint."""
        found = self.examine()
        is_known = found is not None and found["count"] and math.isfinite(found["loss"])
        self.initial_scores = found if is_known else {"count": 0}
        self._initial_head = self._clone_head()

    def return_to_initial(self, body: AnyModel) -> None:
        """Replace the kept model by the initial one: `body` with the initial head."""
        self.kept.load_state_dict({**body.state_dict(), **self._initial_head})

    def return_to_best(self) -> bool:
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

    # The work

    @property
    def planned(self) -> int | None:
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

    def measure(self, seconds: float) -> int:
        """Number of steps that fit into these seconds, including evaluations. Some steps are timed and then undone."""
        first = {name: tensor.clone() for name, tensor in self.objective.state_dict().items()}
        self.total = 1
        times: list[float] = []
        began = last = time.perf_counter()
        for batch in self.loader.epoch(0):
            self.update(batch)
            now = time.perf_counter()
            times.append(now - last)
            last = now
            # The first ones warm up, and compile. All ranks stop at the same step.
            (spent,) = self.ranks.largest(sum(times[_WARM_STEPS:]))
            if spent > _MEASURED_SECONDS or len(times) >= _MEASURED_STEPS:
                break
        usual = statistics.median(times[_WARM_STEPS:] or times)
        self.objective.load_state_dict(first)
        self.optimisers = make_optimisers(self.objective, self.recipe)
        if self.average:
            self.average = Average(self.objective, self.recipe.average)
        between = 0.0
        if self.watch is not None:
            # A forward pass is about a third of a step.
            images = len(self.watch.split) / self.recipe.batch
            between = images * usual / 3 / (self.loader.steps * self.recipe.evaluate_every)
        slowest, spent = self.ranks.largest(usual + between, last - began)
        return max(int(0.95 * max(seconds - spent, 0) / slowest), 1)

    def run(
        self,
        folder: Path,
        log: RunLog,
        state: dict[str, Any],
        stop: Stop,
        snapshot: Callable[[], None] | None = None,
        report: Callable[[], None] | None = None,
        callback: Callback | None = None,
    ) -> None:
        """Train from the current step to the end. `state` goes into every checkpoint; the first rank calls `snapshot`
        at log-spaced steps and `report` after evaluations and checkpoints, and every rank `callback` after each
        step."""
        checkpoints = folder / "checkpoints"
        snapshots = self._snapshot_steps() if snapshot is not None and self.ranks.is_first else frozenset()
        if snapshot is not None and self.step in snapshots:
            snapshot()
        self._saved = time.monotonic()
        images, since = 0, time.perf_counter()
        for epoch, batch in self.batches():
            done = self.update(batch, stop)
            self._losses.append(done.loss if done.is_finite else math.nan)
            if not done.is_finite:
                self.left_out += 1
                self._on_nonfinite(batch, log)
            self.step += 1
            if snapshot is not None and self.step in snapshots:
                snapshot()
            images += batch.global_size
            is_end = self.step == self.total
            is_epoch = is_end or self.step % self.loader.steps == 0
            shown = None
            if is_epoch or self.step % _LOG_EVERY == 0:
                now = time.perf_counter()
                losses = [loss for loss in self._losses if math.isfinite(loss)]
                (mean,) = self.ranks.total(sum(losses) / max(len(losses), 1))
                shown = {
                    "loss": mean if losses else math.nan,
                    "learning_rate": self._rate(self.step - 1),
                    "images_per_second": images / (now - since),
                }
                gradients = {"gradients": self.gradients} if self.options.gradients else {}
                log.write("step", step=self.step, epoch=epoch, seconds=round(self.spent, 2), **shown, **gradients)
                images, since = 0, now
            is_judged = is_epoch and (is_end or (epoch + 1) % self._evaluate_every == 0)
            if is_judged:
                self.evaluate(epoch, log)
                since = time.perf_counter()
            problem = None
            if callback is not None:
                asks, problem = self._call(callback, epoch, done)
                if asks and not is_end and self.stopped is None:
                    self.stopped = "callback"
                    if not is_judged:
                        self.evaluate(epoch, log)
            if shown is not None:
                log.progress(self.step, shown, "" if self.latest is None else self.objective.describe(self.latest))
            if self.stopped is not None:
                self._write_stop(self.stopped, log)
            if done.signal or is_epoch or done.is_due or self.stopped is not None or problem is not None:
                self.collect_damage(log)
                self.save(checkpoints, state, log, must=bool(done.signal))
                if report is not None and self.ranks.is_first and not done.signal:
                    report()
            if problem is not None:
                log.write("callback-failed", step=self.step, error=f"{type(problem).__name__}: {problem}")
                raise problem
            if done.signal:
                name = signal.Signals(done.signal).name
                log.write("stop", step=self.step, signal=name)
                raise Interrupted(
                    f"stopped by {name} after step {self.step} of {self.total}; --resume auto goes on there (in Python:"
                    " resume=True)",
                    128 + done.signal,
                )

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """This rank's batches with their epoch, from the current step to the end."""
        while self.step < self.total and self.stopped is None:
            epoch, offset = divmod(self.step, self.loader.steps)
            with contextlib.closing(self.loader.epoch(epoch, start=offset)) as batches:
                for batch in batches:
                    yield epoch, batch
                    if self.step == self.total or self.stopped is not None:
                        return

    def update(self, batch: Batch, stop: Stop | None = None) -> Done:
        """One step; it is skipped if loss or gradient are not finite on any rank."""
        set_learning_rate(self.optimisers, self._rate(self.step))
        seed = rng.bits(self.options.seed, self.step, self.ranks.rank, stream="step")
        torch.manual_seed(int(seed[0] >> np.uint64(1)))
        self.objective.train()
        self.objective.set_progress(self.step / max(self.total, 1))
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        statistics_before = self._running_statistics() if self.recipe.on_nonfinite == "skip" else []
        loss = 0.0
        parts = list(self.parts(batch))
        for number, (part, weights) in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last or self.ranks.count == 1 else self._runner.no_sync():
                with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.options.amp):
                    losses = self._runner(*part)
                # DDP takes the mean over ranks; the loss is the mean over the images of all of them.
                mean = (losses * weights).sum() / batch.global_size
                (mean * self.ranks.count).backward()
            loss += mean.item()
        gradients = [parameter.grad for parameter in self.objective.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.options.gradients:
            self.gradients = self._layer_gradients()
        if self.recipe.clip:
            torch._foreach_mul_(gradients, torch.clamp(self.recipe.clip / (norm + 1e-6), max=1.0))
        is_finite = math.isfinite(loss) and bool(norm.isfinite())
        is_due = self.ranks.is_first and time.monotonic() - self._saved >= self.options.checkpoint_seconds
        # What all ranks must do together: step or not, stop or not, save or not.
        agreed = map(int, self.ranks.largest(not is_finite, stop.signal if stop else 0, is_due))
        is_wrong, signal_number, is_due = agreed
        if is_wrong:
            for buffer, before in statistics_before:
                buffer.copy_(before)
        else:
            for optimiser in self.optimisers:
                optimiser.step()
            if self.average:
                self.average.update(self.objective, self.step + 1)
        return Done(loss, not is_wrong, signal_number, bool(is_due))

    def _layer_gradients(self) -> list[float]:
        """The norm of the gradient of each layer: what comes before the blocks, each block, what follows them."""
        squares: dict[int, float] = {}
        roles = self.objective.roles()
        for name, parameter in self.objective.named_parameters():
            if parameter.grad is not None:
                layer = roles[name].layer
                squares[layer] = squares.get(layer, 0.0) + float(parameter.grad.square().sum())
        return [round(math.sqrt(squares[layer]), 6) for layer in sorted(squares)]

    def _snapshot_steps(self) -> frozenset[int]:
        """The first state, and as many log-spaced steps as the options ask for."""
        spaced = np.geomspace(1, max(self.total, 1), self.options.snapshots).round().astype(int)
        return frozenset({0, *spaced.tolist()})

    def _running_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that a forward pass changes (BatchNorm's running statistics), and copies of them."""
        return [(buffer, buffer.clone()) for name, buffer in self.objective.named_buffers() if ".running_" in name]

    def parts(self, batch: Batch) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        """The arguments of the objective and the weights of the images, split into `accumulate` parts."""
        device = self.ranks.device
        if not len(batch.labels):  # fewer images than ranks: take part in the step, but weigh nothing
            yield (*self.blank(), None, None), torch.zeros(2, device=device)
            return
        images = self.preprocess.scale(batch.pixels.to(device))
        labels, weights = batch.labels.to(device), batch.weights.to(device)
        others, shares = None, None
        if batch.mixture is not None:
            images = mix(images, batch.mixture)
            others = labels[torch.from_numpy(batch.mixture.partner).to(device)]
            shares = torch.from_numpy(batch.mixture.share).to(device, torch.float32)
        size = -(-len(labels) // self.recipe.accumulate)
        for start in range(0, len(labels), size):
            chosen = slice(start, start + size)
            mixed = (None, None) if others is None or shares is None else (others[chosen], shares[chosen])
            yield (images[chosen], labels[chosen], *mixed), weights[chosen]

    @property
    def peak_rate(self) -> float:
        """The peak learning rate: the recipe's, scaled for the initial weights."""
        return self.recipe.learning_rate * self.rate_scale

    def _rate(self, step: int) -> float:
        return self.peak_rate * schedule(self.recipe, step, self.total)

    # What happens around a step

    def evaluate(self, epoch: int, log: RunLog) -> None:
        """Evaluate the kept model; record the step if it is the best so far, and end the run if patience is over."""
        found = self.ranks.from_first(self.examine())  # all ranks must come to the same end
        if found is None:
            return
        self.write_evaluation(epoch, found, log)
        is_finite = math.isfinite(found["score"]) and math.isfinite(found["loss"])
        if is_finite and (self.best is None or found["score"] > self.best["score"]):
            self.best, self.waited = {"step": self.step, **found}, 0
            if self.recipe.patience:
                self._best_state = self._clone_kept()
        else:
            self.waited += 1
        if self.recipe.patience and self.waited >= self.recipe.patience and self.step < self.total:
            self.stopped = self.stopped or "patience"
        self.latest = found

    def _call(self, callback: Callback, epoch: int, done: Done) -> tuple[bool, BaseException | None]:
        """Call the user's function. Returns whether any rank asks to stop, and the error to raise if any rank has one:
        all ranks then save a checkpoint first."""
        (loss,) = self.ranks.total(done.loss)
        asks, problem = False, None
        self.objective.eval()
        seen = Step(
            step=self.step,
            total=self.total,
            epoch=epoch,
            loss=loss if done.is_finite else math.nan,
            learning_rate=self._rate(self.step - 1),
            model=self.objective.model,
            held_out=self.latest,
        )
        try:
            asks = asks_to_stop(callback(seen))
        except (Exception, SystemExit) as error:  # whatever it is, it is the user's own, and comes through
            problem = error
        asks, fails = map(bool, self.ranks.largest(asks, problem is not None))
        if fails and problem is None:
            problem = VitrailError("The callback of another rank raised an error; see its own error message.")
        return asks, problem

    def _write_stop(self, reason: Ending, log: RunLog) -> None:
        """Record that the run ends before its last step."""
        best = self.best["step"] if self.best is not None else None
        log.write("stop", step=self.step, reason=reason, best=best)
        why = "its callback asked for it"
        if reason == "patience":
            since = "no score was finite" if best is None else f"no better score than that of step {best}"
            why = f"{since} in {counted(self.waited, 'evaluation')} on the held-out images"
        log.say(f"stopped after step {self.step} of {self.total}: {why}")

    def write_evaluation(self, epoch: int, found: dict[str, Any], log: RunLog) -> None:
        """Write a line of `metrics.jsonl` for an evaluation at this step."""
        numbers = {name: number for name, number in found.items() if name != "score"}
        weights = "average" if self.average else "last"
        seconds = round(self.spent, 2)
        log.write("evaluate", step=self.step, epoch=epoch, seconds=seconds, **numbers, weights=weights)

    @torch.inference_mode()
    def examine(self) -> dict[str, Any] | None:
        """Loss, share of right answers and score on the held-out images, each counted once over all ranks."""
        return None if self.watch is None else self.examine_on(self.watch)

    def examine_on(self, loader: Loader) -> dict[str, Any]:
        """The same on the images of a loader."""
        objective = self.kept_objective
        was_training = objective.training
        objective.eval()
        found = objective.evaluate(self._held_out(loader), self.ranks)
        objective.train(was_training)
        return {"score": objective.goodness(found), **found}

    def _held_out(self, loader: Loader) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This rank's batches of images, labels and weights."""
        device = self.ranks.device
        for batch in loader.epoch():
            if len(batch.labels):
                images = self.preprocess.scale(batch.pixels.to(device))
                yield images, batch.labels.to(device), batch.weights.double()

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
            "left_out": self.left_out,
            "seconds": round(self.spent, 1),
            "start": self.initial_scores,
            "rate_scale": self.rate_scale,
            "waited": self.waited,
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
        tidy(checkpoints, keep=self.options.keep, best=self.best["step"] if self.best else None)

    @property
    def spent(self) -> float:
        """Seconds of the run so far, including those before interruptions."""
        return self.seconds + time.monotonic() - self.began

    def _on_nonfinite(self, batch: Batch, log: RunLog) -> None:
        """Stop or skip after a non-finite loss, as the recipe says. The named samples are those of all ranks."""
        epoch, offset = divmod(self.step, self.loader.steps)
        samples = self.loader.order(epoch)[offset * self.loader.batch :][: batch.global_size].tolist()
        log.write("nonfinite", step=self.step, samples=samples, policy=self.recipe.on_nonfinite)
        if self.recipe.on_nonfinite == "stop":
            raise VitrailError(
                f"Loss or gradient is not finite at step {self.step} (samples {str(samples[:8])[1:-1]}, ...;"
                " all in metrics.jsonl). Lower the learning rate or clip gradients; checkpoints before it are intact."
            )
        log.say(f"warning: loss or gradient is not finite at step {self.step}; the step is left out")

    def collect_damage(self, log: RunLog, *others: Loader) -> None:
        """Report each unreadable image once, whichever rank found it."""
        mine = {}
        for loader in (self.loader, self.watch, *others):
            mine |= loader.damaged if loader is not None else {}
        for theirs in self.ranks.gather(mine):
            for path, reason in theirs.items():
                if path not in self.damaged:
                    self.damaged[path] = reason
                    log.write("damaged", file=path, reason=reason, policy=self.recipe.on_damage)
                    log.say(f"warning: {reason.removesuffix('.')} (on_damage: {self.recipe.on_damage})")
        trained = self.loader.split
        if self.damaged and all(trained.name_of(index) in self.damaged for index in range(len(trained))):
            raise DamagedError(f"No image of {trained.name} can be read: {next(iter(self.damaged.values()))}")


def _with_null(found: dict[str, Any]) -> dict[str, Any]:
    """An evaluation for JSON, which has no word for numbers that are not finite."""
    return {name: number if math.isfinite(number) else None for name, number in found.items()}


def _with_nan(found: dict[str, Any]) -> dict[str, Any]:
    """The same, back from JSON."""
    return {name: math.nan if number is None else number for name, number in found.items()}


def _last(checkpoints: Path) -> str:
    steps = steps_of(checkpoints)
    return f"the last intact checkpoint is of step {steps[-1]}" if steps else "there is no checkpoint yet"
