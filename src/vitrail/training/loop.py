"""The training loop: one for every family, objective and number of ranks.

A step is a pure function of the weights before it and of (seed, step): samples and augmentation come from
`data.loader`, and torch's random generator, which dropout uses, is seeded at every step. A run that was killed and
resumed therefore ends with the same bits as an uninterrupted one, on one machine with the same number of threads.
"""

import collections
import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from vitrail.core import rng
from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.core.settings import pluralise
from vitrail.data.augment.pipeline import mix
from vitrail.data.cache import ImageCache
from vitrail.data.dataset import Split
from vitrail.data.loader import Batch, Loader
from vitrail.data.preprocess import Preprocess
from vitrail.models.base import AnyModel
from vitrail.training.average import WeightAverage
from vitrail.training.callback import Callback, Step, is_stop_request
from vitrail.training.gradients import layer_gradient_norms
from vitrail.training.length import measure_steps
from vitrail.training.objectives.base import Objective, Task, make_objective
from vitrail.training.observer import RunProgress
from vitrail.training.optimisers.base import make_optimisers, set_learning_rate
from vitrail.training.options import Options
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import Recipe
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import StopReason
from vitrail.training.schedule import schedule
from vitrail.training.stop import Interrupted, StopSignal
from vitrail.training.trainer_checkpoint import save_trainer

LOG_EVERY = 10
"""Steps between lines of the log; a logged loss is the mean over these steps."""


class StepResult(NamedTuple):
    """Result of one training step. All fields except `loss` are equal on all ranks."""

    loss: float
    """Share of this rank in the mean loss."""
    is_finite: bool
    """Whether loss and gradient were finite on all ranks; otherwise the step was skipped."""
    signal: int
    """The signal that a rank received, or 0."""
    is_checkpoint_due: bool


class Trainer:
    """Trains a model: `Trainer(model, preprocess, training, held_out, recipe, options, Ranks()).fit()`.

    `labels` are the names of the classes, and `learned` has initial values for parameters of the objective.
    """

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
        self.loader = self._make_loader(
            training, batch=recipe.batch, settings=recipe.augment, shuffle=True, on_damage=recipe.on_damage
        )
        self.held_out_loader = self.evaluation_loader(held_out) if held_out is not None else None

        # Progress, which checkpoints store (see `training.run_state`)
        self.step, self.total, self.seconds = 0, self.planned_steps or 0, 0.0
        self.rate_scale = 1.0
        self.best: dict[str, Any] | None = None
        self.best_weights: dict[str, Tensor] = {}
        self.evaluations_since_best = 0
        self.latest: dict[str, Any] | None = None
        self.starting_scores: dict[str, Any] | None = None
        self.starting_head: dict[str, Tensor] = {}
        self.stopped: StopReason | None = None
        self.damaged: dict[str, str] = {}
        self.skipped_steps = 0
        self.recent_losses: collections.deque[float] = collections.deque(maxlen=LOG_EVERY)

        self.gradient_norms: list[float] = []
        self.start_time = self._last_save_time = time.monotonic()
        self._wrapped_objective: Any = self.objective
        if options.compile:
            self._wrapped_objective = torch.compile(self._wrapped_objective)
        if ranks.count > 1:
            self._wrapped_objective = DistributedDataParallel(self._wrapped_objective)

    def _make_loader(self, split: Split, **settings: Any) -> Loader:
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
        """Return a loader that reads each image of a split once, in order. Unreadable images are never substituted."""
        on_damage = "error" if self.recipe.on_damage == "error" else "skip"
        return self._make_loader(split, batch=max(self.recipe.batch, 64), shuffle=False, on_damage=on_damage)

    def blank_batch(self, count: int = 2) -> tuple[Tensor, Tensor]:
        """Return a batch of zeros with arbitrary labels. The default of two images is the minimum for BatchNorm."""
        shape, device = (count, self.preprocess.channels, *self.preprocess.resolution), self.ranks.device
        label = torch.from_numpy(self.loader.split.labels[:1])
        return torch.zeros(shape, device=device), label.new_zeros((count, *label.shape[1:]), device=device)

    @property
    def planned_steps(self) -> int | None:
        """Number of steps; None if the recipe has a time limit."""
        if self.recipe.epochs is None:
            return self.recipe.steps
        return max(self.recipe.epochs, self._minimum_epochs) * self.loader.steps

    @property
    def _minimum_epochs(self) -> int:
        """Number of epochs in which the model sees the recipe's `least_images`."""
        return math.ceil(self.recipe.least_images / len(self.loader.split))

    @property
    def _evaluate_every(self) -> int:
        """Epochs between evaluations. Additional epochs for few images do not add evaluations."""
        factor = math.ceil(self._minimum_epochs / (self.recipe.epochs or 1))
        return self.recipe.evaluate_every * max(factor, 1)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of the run so far, including those before interruptions."""
        return self.seconds + time.monotonic() - self.start_time

    @property
    def progress(self) -> RunProgress:
        """Number of steps done, number of planned steps, and seconds."""
        return RunProgress(self.step, self.total, self.elapsed_seconds)

    @property
    def peak_learning_rate(self) -> float:
        """Peak learning rate of the recipe, scaled for the starting point."""
        return self.recipe.learning_rate * self.rate_scale

    def _learning_rate(self, step: int) -> float:
        return self.peak_learning_rate * schedule(self.recipe, step, self.total)

    # The loop

    def fit(
        self,
        callback: Callback | None = None,
        *,
        log: RunLog | None = None,
        checkpoints: Path | None = None,
        state: dict[str, Any] | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        """Train from the current step to the last step of the recipe; `kept_model` is then the trained model.

        Every rank calls `callback` after each step. Events go to `log`. Checkpoints with the additional fields `state`
        are written to `checkpoints` unless it is None. A signal in `stop` raises Interrupted after the current step.
        """
        if self.planned_steps is None and not self.total:
            self.total = int(self.ranks.broadcast(measure_steps(self, 60 * (self.recipe.minutes or 0.0))))
        log = RunLog(Path(), self.total, writes=False) if log is None else log
        self.mark_saved()
        images, interval_start = 0, time.perf_counter()
        for epoch, batch in self._batches():
            step = self.update(batch, stop)
            self._record_step(batch, step, log)
            images += batch.global_size
            is_last = self.step == self.total
            ends_epoch = is_last or self.step % self.loader.steps == 0
            numbers = None
            if ends_epoch or self.step % LOG_EVERY == 0:
                now = time.perf_counter()
                numbers = self._log_step(epoch, images / (now - interval_start), log)
                images, interval_start = 0, now
            is_evaluated = ends_epoch and (is_last or (epoch + 1) % self._evaluate_every == 0)
            if is_evaluated:
                self.evaluate(epoch, log)
                interval_start = time.perf_counter()
            failure = None
            if callback is not None:
                wants_stop, failure = self._call_callback(callback, epoch, step)
                if wants_stop and not is_last and self.stopped is None:
                    self.stopped = "callback"
                    if not is_evaluated:
                        self.evaluate(epoch, log)
            if numbers is not None:
                log.progress(self.step, numbers, "" if self.latest is None else self.objective.describe(self.latest))
            if self.stopped is not None:
                self._log_stop(self.stopped, log)
            if step.signal or ends_epoch or step.is_checkpoint_due or self.stopped is not None or failure is not None:
                self.collect_damage(log)
                if checkpoints is not None:
                    save_trainer(self, checkpoints, state or {}, log, required=bool(step.signal))
                if not step.signal:
                    log.update(self.progress)
            if failure is not None:
                log.write("callback-failed", step=self.step, error=f"{type(failure).__name__}: {failure}")
                raise failure
            if step.signal:
                self._raise_interrupted(step.signal, log)

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """Yield this rank's batches with their epoch, from the current step to the end."""
        while self.step < self.total and self.stopped is None:
            epoch, offset = divmod(self.step, self.loader.steps)
            with contextlib.closing(self.loader.epoch(epoch, start=offset)) as batches:
                for batch in batches:
                    yield epoch, batch
                    if self.step == self.total or self.stopped is not None:
                        return

    def _record_step(self, batch: Batch, step: StepResult, log: RunLog) -> None:
        """Count the step and store its loss. Log a step that was not finite; raise if `on_nonfinite` is "stop"."""
        self.recent_losses.append(step.loss if step.is_finite else math.nan)
        if not step.is_finite:
            self.skipped_steps += 1
            self._handle_nonfinite(batch, log)
        self.step += 1
        log.step(self.step)

    def _handle_nonfinite(self, batch: Batch, log: RunLog) -> None:
        """Log the samples of all ranks in this step, and raise VitrailError if `on_nonfinite` is "stop"."""
        epoch, offset = divmod(self.step, self.loader.steps)
        samples = self.loader.order(epoch)[offset * self.loader.batch :][: batch.global_size].tolist()
        log.write("nonfinite", step=self.step, samples=samples, policy=self.recipe.on_nonfinite)
        if self.recipe.on_nonfinite == "stop":
            raise VitrailError(
                f"Loss or gradient is not finite at step {self.step} (samples {str(samples[:8])[1:-1]}, ...;"
                " all in metrics.jsonl). Lower the learning rate or clip gradients. Earlier checkpoints are intact."
            )
        log.say(f"warning: loss or gradient is not finite at step {self.step}; the step is skipped")

    def _log_step(self, epoch: int, speed: float, log: RunLog) -> dict[str, float]:
        """Log the mean loss of the last steps over all ranks, the learning rate and the speed, and return them."""
        losses = [loss for loss in self.recent_losses if math.isfinite(loss)]
        (mean,) = self.ranks.reduce_sum(sum(losses) / max(len(losses), 1))
        numbers = {
            "loss": mean if losses else math.nan,
            "learning_rate": self._learning_rate(self.step - 1),
            "images_per_second": speed,
        }
        gradients = {"gradients": self.gradient_norms} if self.options.gradients else {}
        log.write("step", step=self.step, epoch=epoch, seconds=round(self.elapsed_seconds, 2), **numbers, **gradients)
        return numbers

    def _call_callback(self, callback: Callback, epoch: int, result: StepResult) -> tuple[bool, BaseException | None]:
        """Call the user's callback. Return whether it asked to stop on any rank, and an exception if it failed on any.

        The caller raises the exception after all ranks have saved a checkpoint.
        """
        (loss,) = self.ranks.reduce_sum(result.loss)
        wants_stop, failure = False, None
        self.objective.eval()
        step = Step(
            step=self.step,
            total=self.total,
            epoch=epoch,
            loss=loss if result.is_finite else math.nan,
            learning_rate=self._learning_rate(self.step - 1),
            model=self.objective.model,
            held_out=self.latest,
        )
        try:
            wants_stop = is_stop_request(callback(step))
        except (Exception, SystemExit) as error:  # any exception of the callback is raised unchanged
            failure = error
        wants_stop, fails = map(bool, self.ranks.reduce_max(wants_stop, failure is not None))
        if fails and failure is None:
            failure = VitrailError("The callback of another rank raised an error; see its own error message.")
        return wants_stop, failure

    def _log_stop(self, reason: StopReason, log: RunLog) -> None:
        """Log that the run ends before its last step."""
        best = self.best["step"] if self.best is not None else None
        log.write("stop", step=self.step, reason=reason, best=best)
        explanation = "the callback returned True"
        if reason == "patience":
            outcome = "no score was finite" if best is None else f"no better score than that of step {best}"
            explanation = f"{outcome} in {pluralise(self.evaluations_since_best, 'evaluation')} on the held-out images"
        log.say(f"stopped after step {self.step} of {self.total}: {explanation}")

    def _raise_interrupted(self, number: int, log: RunLog) -> None:
        name = signal.Signals(number).name
        log.write("stop", step=self.step, signal=name)
        raise Interrupted(
            f"stopped by {name} after step {self.step} of {self.total}; --resume auto continues from there (in Python:"
            " resume=True)",
            128 + number,
        )

    # One step

    def update(self, batch: Batch, stop: StopSignal | None = None) -> StepResult:
        """Update the weights with one batch, unless the loss or gradient is not finite on any of the ranks."""
        set_learning_rate(self.optimisers, self._learning_rate(self.step))
        seed = rng.bits(self.options.seed, self.step, self.ranks.rank, stream="step")
        torch.manual_seed(int(seed[0] >> np.uint64(1)))
        self.objective.train()
        self.objective.set_progress(self.step / max(self.total, 1))
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        statistics_before = self._running_statistics() if self.recipe.on_nonfinite == "skip" else []
        loss = 0.0
        parts = list(self.split_batch(batch))
        for number, (arguments, weights) in enumerate(parts):
            is_last = number == len(parts) - 1
            with contextlib.nullcontext() if is_last or self.ranks.count == 1 else self._wrapped_objective.no_sync():
                with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.options.amp):
                    losses = self._wrapped_objective(*arguments)
                # DDP averages gradients over ranks; the loss is the mean over the images of all ranks.
                mean = (losses * weights).sum() / batch.global_size
                (mean * self.ranks.count).backward()
            loss += mean.item()
        gradients = [parameter.grad for parameter in self.objective.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self.options.gradients:
            self.gradient_norms = layer_gradient_norms(self.objective)
        if self.recipe.clip:
            torch._foreach_mul_(gradients, torch.clamp(self.recipe.clip / (norm + 1e-6), max=1.0))
        is_finite = math.isfinite(loss) and bool(norm.isfinite())
        is_due = self.ranks.is_first and time.monotonic() - self._last_save_time >= self.options.checkpoint_seconds
        # All ranks must make the same decision to update weights, to stop and to save.
        is_nonfinite, signal_number, is_due = map(
            int, self.ranks.reduce_max(not is_finite, stop.signal if stop else 0, is_due)
        )
        if is_nonfinite:
            for buffer, before in statistics_before:
                buffer.copy_(before)
        else:
            for optimiser in self.optimisers:
                optimiser.step()
            if self.average:
                self.average.update(self.objective, self.step + 1)
        return StepResult(loss, not is_nonfinite, signal_number, bool(is_due))

    def split_batch(self, batch: Batch) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        """Yield the `accumulate` parts of a batch: the arguments of the objective and the weight of each image."""
        device = self.ranks.device
        if not len(batch.labels):  # fewer images than ranks: this rank takes part with weight 0
            yield (*self.blank_batch(), None, None), torch.zeros(2, device=device)
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
            part = slice(start, start + size)
            mixed = (None, None) if others is None or shares is None else (others[part], shares[part])
            yield (images[part], labels[part], *mixed), weights[part]

    def _running_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Return the buffers that a forward pass changes (running statistics of BatchNorm), each with a copy."""
        return [(buffer, buffer.clone()) for name, buffer in self.objective.named_buffers() if ".running_" in name]

    def mark_saved(self) -> None:
        """Restart the interval until the next checkpoint."""
        self._last_save_time = time.monotonic()

    # Evaluation

    def evaluate(self, epoch: int, log: RunLog) -> None:
        """Evaluate the kept model, store its weights if they are the best, and stop if patience is exhausted."""
        evaluation = self.ranks.broadcast(self.evaluate_held_out())  # ranks may differ in the last bits
        if evaluation is None:
            return
        self.log_evaluation(epoch, evaluation, log)
        is_finite = math.isfinite(evaluation["score"]) and math.isfinite(evaluation["loss"])
        if is_finite and (self.best is None or evaluation["score"] > self.best["score"]):
            self.best, self.evaluations_since_best = {"step": self.step, **evaluation}, 0
            if self.recipe.patience:
                self.best_weights = self.clone_kept_weights()
        else:
            self.evaluations_since_best += 1
        if self.recipe.patience and self.evaluations_since_best >= self.recipe.patience and self.step < self.total:
            self.stopped = self.stopped or "patience"
        self.latest = evaluation

    def log_evaluation(self, epoch: int, evaluation: dict[str, Any], log: RunLog) -> None:
        """Log an evaluation at the current step."""
        numbers = {name: number for name, number in evaluation.items() if name != "score"}
        weights = "average" if self.average else "last"
        seconds = round(self.elapsed_seconds, 2)
        log.write("evaluate", step=self.step, epoch=epoch, seconds=seconds, **numbers, weights=weights)

    @torch.inference_mode()
    def evaluate_held_out(self) -> dict[str, Any] | None:
        """Return metrics and score of the kept model on the held-out images; None if there are none."""
        return None if self.held_out_loader is None else self.evaluate_loader(self.held_out_loader)

    def evaluate_loader(self, loader: Loader) -> dict[str, Any]:
        """Return metrics and score of the kept model on the images of a loader, each counted once over all ranks."""
        objective = self.kept_objective
        was_training = objective.training
        objective.eval()
        metrics = objective.evaluate(self._evaluation_batches(loader), self.ranks)
        objective.train(was_training)
        return {"score": objective.goodness(metrics), **metrics}

    def _evaluation_batches(self, loader: Loader) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield this rank's batches of images, labels and weights."""
        device = self.ranks.device
        for batch in loader.epoch():
            if len(batch.labels):
                images = self.preprocess.scale(batch.pixels.to(device))
                yield images, batch.labels.to(device), batch.weights.double()

    def evaluate_starting_point(self) -> None:
        """Evaluate the model before the first step, and copy its head, which checkpoints will contain."""
        scores = self.evaluate_held_out()
        is_usable = scores is not None and scores["count"] and math.isfinite(scores["loss"])
        self.starting_scores = scores if is_usable else {"count": 0}
        self.starting_head = self.clone_head()

    def collect_damage(self, log: RunLog, *loaders: Loader) -> None:
        """Log each unreadable image of all loaders once. Raise CorruptFileError if no training image is left."""
        local = {}
        for loader in (self.loader, self.held_out_loader, *loaders):
            local |= loader.damaged if loader is not None else {}
        for reasons in self.ranks.gather(local):
            for path, reason in reasons.items():
                if path not in self.damaged:
                    self.damaged[path] = reason
                    log.write("damaged", file=path, reason=reason, policy=self.recipe.on_damage)
                    log.say(f"warning: {reason.removesuffix('.')} (on_damage: {self.recipe.on_damage})")
        split = self.loader.split
        if self.damaged and all(split.image_name(index) in self.damaged for index in range(len(split))):
            raise CorruptFileError(f"No image of {split.name} can be read: {next(iter(self.damaged.values()))}")

    # The model to keep: the starting point, the best weights or the last weights

    @property
    def kept_model(self) -> AnyModel:
        """The model that is evaluated and saved: the running average if there is one, otherwise the last weights."""
        return self.kept_objective.model

    @property
    def kept_objective(self) -> Objective:
        """The objective that contains the kept model."""
        return self.average.model if self.average else self.objective  # ty: ignore[invalid-return-type]

    def restore_starting_point(self, body: AnyModel) -> None:
        """Replace the weights of the kept model by those of `body`, with the head of the starting point."""
        self.kept_model.load_state_dict({**body.state_dict(), **self.starting_head})

    def restore_best(self) -> bool:
        """Replace the kept weights by the best weights on the held-out images. Return False if none are stored."""
        if not self.best_weights or self.best is None:
            return False
        self.kept_objective.load_state_dict(self.best_weights)
        self.latest = {name: number for name, number in self.best.items() if name != "step"}
        return True

    def clone_kept_weights(self) -> dict[str, Tensor]:
        """Return copies of the tensors of the kept objective."""
        return {name: tensor.clone() for name, tensor in self.kept_objective.state_dict().items()}

    def clone_head(self) -> dict[str, Tensor]:
        """Return copies of the tensors of the model's head."""
        tensors = self.objective.model.state_dict()
        return {name: tensor.clone() for name, tensor in tensors.items() if name.startswith("head.")}
