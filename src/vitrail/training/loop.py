"""The training loop: one for every family, objective and number of ranks.

A step is a pure function of the weights before it and of (seed, step): samples and augmentation come from
`data.loader`, and torch's generator for dropout is seeded at every step. So a run that was killed and resumed ends with
the same bits as one that was not, on one machine with the same number of threads.
"""

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

from vitrail.core import rng
from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.core.settings import pluralise
from vitrail.data.augment.pipeline import mix
from vitrail.data.loader import Batch, Loader
from vitrail.training.callback import Callback, Step, asks_to_stop
from vitrail.training.length import measure_steps
from vitrail.training.optimisers.base import set_learning_rate
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import StopReason
from vitrail.training.schedule import schedule
from vitrail.training.stop import Interrupted, StopSignal
from vitrail.training.trainer_state import LOG_EVERY, TrainerState


class StepResult(NamedTuple):
    """Result of one step, agreed by all ranks."""

    loss: float
    """This rank's part of the loss."""
    is_finite: bool
    """Whether loss and gradient were finite on all ranks; otherwise the step was skipped."""
    signal: int
    """The signal that some rank received, or 0."""
    is_due: bool
    """Whether a checkpoint is due."""


class Trainer(TrainerState):
    """Trains a model: `Trainer(model, preprocess, training, held_out, recipe, options, Ranks()).fit()`."""

    def fit(
        self,
        callback: Callback | None = None,
        *,
        log: RunLog | None = None,
        checkpoints: Path | None = None,
        state: dict[str, Any] | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        """Train from the current step to the last one of the recipe. `kept_model` is then the trained model.

        Every rank calls `callback` after each step. Events go to `log`. Checkpoints, with the fields of `state` in
        addition, go to the folder `checkpoints`; without one, none are written. A signal in `stop` ends the run after
        the step.
        """
        if self.planned_steps is None and not self.total:
            self.total = int(self.ranks.broadcast(measure_steps(self, 60 * (self.recipe.minutes or 0.0))))
        log = RunLog(Path(), self.total, writes=False) if log is None else log
        self._saved = time.monotonic()
        images, since = 0, time.perf_counter()
        for epoch, batch in self._batches():
            done = self.update(batch, stop)
            self._count(batch, done, log)
            images += batch.global_size
            is_end = self.step == self.total
            is_epoch = is_end or self.step % self.loader.steps == 0
            numbers = None
            if is_epoch or self.step % LOG_EVERY == 0:
                now = time.perf_counter()
                numbers = self._write_step(epoch, images / (now - since), log)
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
            if numbers is not None:
                log.progress(self.step, numbers, "" if self.latest is None else self.objective.describe(self.latest))
            if self.stopped is not None:
                self._write_stop(self.stopped, log)
            if done.signal or is_epoch or done.is_due or self.stopped is not None or problem is not None:
                self.collect_damage(log)
                if checkpoints is not None:
                    self.save(checkpoints, state or {}, log, must=bool(done.signal))
                if not done.signal:
                    log.update(self.progress)
            if problem is not None:
                log.write("callback-failed", step=self.step, error=f"{type(problem).__name__}: {problem}")
                raise problem
            if done.signal:
                self._interrupt(done.signal, log)

    def _count(self, batch: Batch, done: StepResult, log: RunLog) -> None:
        """Count the step. One that was not finite ends the run or is left out, as the recipe says."""
        self._losses.append(done.loss if done.is_finite else math.nan)
        if not done.is_finite:
            self.skipped_steps += 1
            self._on_nonfinite(batch, log)
        self.step += 1
        log.step(self.step)

    def _write_step(self, epoch: int, speed: float, log: RunLog) -> dict[str, float]:
        """Log the mean loss of the last steps, the learning rate and the speed. Returns these numbers."""
        losses = [loss for loss in self._losses if math.isfinite(loss)]
        (mean,) = self.ranks.reduce_sum(sum(losses) / max(len(losses), 1))
        numbers = {
            "loss": mean if losses else math.nan,
            "learning_rate": self._rate(self.step - 1),
            "images_per_second": speed,
        }
        gradients = {"gradients": self.gradients} if self.options.gradients else {}
        log.write("step", step=self.step, epoch=epoch, seconds=round(self.elapsed_seconds, 2), **numbers, **gradients)
        return numbers

    def _interrupt(self, number: int, log: RunLog) -> None:
        name = signal.Signals(number).name
        log.write("stop", step=self.step, signal=name)
        raise Interrupted(
            f"stopped by {name} after step {self.step} of {self.total}; --resume auto goes on there (in Python:"
            " resume=True)",
            128 + number,
        )

    def _batches(self) -> Iterator[tuple[int, Batch]]:
        """This rank's batches with their epoch, from the current step to the end."""
        while self.step < self.total and self.stopped is None:
            epoch, offset = divmod(self.step, self.loader.steps)
            with contextlib.closing(self.loader.epoch(epoch, start=offset)) as batches:
                for batch in batches:
                    yield epoch, batch
                    if self.step == self.total or self.stopped is not None:
                        return

    def update(self, batch: Batch, stop: StopSignal | None = None) -> StepResult:
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
        parts = list(self.split_batch(batch))
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
        agreed = map(int, self.ranks.reduce_max(not is_finite, stop.signal if stop else 0, is_due))
        is_wrong, signal_number, is_due = agreed
        if is_wrong:
            for buffer, before in statistics_before:
                buffer.copy_(before)
        else:
            for optimiser in self.optimisers:
                optimiser.step()
            if self.average:
                self.average.update(self.objective, self.step + 1)
        return StepResult(loss, not is_wrong, signal_number, bool(is_due))

    def _layer_gradients(self) -> list[float]:
        """The norm of the gradient of each layer: what comes before the blocks, each block, what follows them."""
        squares: dict[int, float] = {}
        roles = self.objective.roles()
        for name, parameter in self.objective.named_parameters():
            if parameter.grad is not None:
                layer = roles[name].layer
                squares[layer] = squares.get(layer, 0.0) + float(parameter.grad.square().sum())
        return [round(math.sqrt(squares[layer]), 6) for layer in sorted(squares)]

    def _running_statistics(self) -> list[tuple[Tensor, Tensor]]:
        """The buffers that a forward pass changes (BatchNorm's running statistics), and copies of them."""
        return [(buffer, buffer.clone()) for name, buffer in self.objective.named_buffers() if ".running_" in name]

    def split_batch(self, batch: Batch) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        """The arguments of the objective and the weights of the images, split into `accumulate` parts."""
        device = self.ranks.device
        if not len(batch.labels):  # fewer images than ranks: take part in the step, but weigh nothing
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
            chosen = slice(start, start + size)
            mixed = (None, None) if others is None or shares is None else (others[chosen], shares[chosen])
            yield (images[chosen], labels[chosen], *mixed), weights[chosen]

    @property
    def peak_learning_rate(self) -> float:
        """The peak learning rate: the recipe's, scaled for the initial weights."""
        return self.recipe.learning_rate * self.rate_scale

    def _rate(self, step: int) -> float:
        return self.peak_learning_rate * schedule(self.recipe, step, self.total)

    # What happens around a step

    def evaluate(self, epoch: int, log: RunLog) -> None:
        """Evaluate the kept model; record the step if it is the best so far, and end the run if patience is over."""
        found = self.ranks.broadcast(self.score_held_out())  # all ranks must come to the same end
        if found is None:
            return
        self.write_evaluation(epoch, found, log)
        is_finite = math.isfinite(found["score"]) and math.isfinite(found["loss"])
        if is_finite and (self.best is None or found["score"] > self.best["score"]):
            self.best, self.evaluations_since_best = {"step": self.step, **found}, 0
            if self.recipe.patience:
                self._best_state = self._clone_kept()
        else:
            self.evaluations_since_best += 1
        if self.recipe.patience and self.evaluations_since_best >= self.recipe.patience and self.step < self.total:
            self.stopped = self.stopped or "patience"
        self.latest = found

    def _call(self, callback: Callback, epoch: int, done: StepResult) -> tuple[bool, BaseException | None]:
        """Call the user's function. Returns whether any rank asks to stop, and the error to raise if any rank has one:
        all ranks then save a checkpoint first."""
        (loss,) = self.ranks.reduce_sum(done.loss)
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
        asks, fails = map(bool, self.ranks.reduce_max(asks, problem is not None))
        if fails and problem is None:
            problem = VitrailError("The callback of another rank raised an error; see its own error message.")
        return asks, problem

    def _write_stop(self, reason: StopReason, log: RunLog) -> None:
        """Record that the run ends before its last step."""
        best = self.best["step"] if self.best is not None else None
        log.write("stop", step=self.step, reason=reason, best=best)
        why = "its callback asked for it"
        if reason == "patience":
            since = "no score was finite" if best is None else f"no better score than that of step {best}"
            why = f"{since} in {pluralise(self.evaluations_since_best, 'evaluation')} on the held-out images"
        log.say(f"stopped after step {self.step} of {self.total}: {why}")

    def write_evaluation(self, epoch: int, found: dict[str, Any], log: RunLog) -> None:
        """Write a line of `metrics.jsonl` for an evaluation at this step."""
        numbers = {name: number for name, number in found.items() if name != "score"}
        weights = "average" if self.average else "last"
        seconds = round(self.elapsed_seconds, 2)
        log.write("evaluate", step=self.step, epoch=epoch, seconds=seconds, **numbers, weights=weights)

    @torch.inference_mode()
    def score_held_out(self) -> dict[str, Any] | None:
        """Metrics and score of the kept model on the held-out images, each counted once over all ranks."""
        return None if self.held_out_loader is None else self.score_on(self.held_out_loader)

    def score_starting_point(self) -> None:
        """Evaluate the initial model with its head from least squares, and keep that head in every checkpoint."""
        scores = self.score_held_out()
        is_usable = scores is not None and scores["count"] and math.isfinite(scores["loss"])
        self.initial_scores = scores if is_usable else {"count": 0}
        self._initial_head = self._clone_head()

    def score_on(self, loader: Loader) -> dict[str, Any]:
        """Metrics and score of the kept model on the images of a loader."""
        objective = self.kept_objective
        was_training = objective.training
        objective.eval()
        metrics = objective.evaluate(self._batches_of(loader), self.ranks)
        objective.train(was_training)
        return {"score": objective.goodness(metrics), **metrics}

    def _batches_of(self, loader: Loader) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """This rank's batches of images, labels and weights."""
        device = self.ranks.device
        for batch in loader.epoch():
            if len(batch.labels):
                images = self.preprocess.scale(batch.pixels.to(device))
                yield images, batch.labels.to(device), batch.weights.double()

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
        for loader in (self.loader, self.held_out_loader, *others):
            mine |= loader.damaged if loader is not None else {}
        for theirs in self.ranks.gather(mine):
            for path, reason in theirs.items():
                if path not in self.damaged:
                    self.damaged[path] = reason
                    log.write("damaged", file=path, reason=reason, policy=self.recipe.on_damage)
                    log.say(f"warning: {reason.removesuffix('.')} (on_damage: {self.recipe.on_damage})")
        trained = self.loader.split
        if self.damaged and all(trained.image_name(index) in self.damaged for index in range(len(trained))):
            raise CorruptFileError(f"No image of {trained.name} can be read: {next(iter(self.damaged.values()))}")
