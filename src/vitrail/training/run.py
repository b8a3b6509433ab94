"""A training run: from DATA and a starting point to a folder with checkpoints, metrics and a bundle."""

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from vitrail import __version__
from vitrail.bundles.bundle import Bundle, save
from vitrail.core.errors import UsageError
from vitrail.core.memory import check_allocation
from vitrail.core.notebook import card
from vitrail.core.settings import pluralise
from vitrail.core.terminal import Say, say, say_nothing
from vitrail.data.cache import ImageCache
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources.registry import AnyData, data_arguments, open_data
from vitrail.evaluation.history import read_events
from vitrail.evaluation.predictions.saved_predictions import PREDICTIONS_FILE
from vitrail.models import zoo
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.models.device import describe_use
from vitrail.models.roles import has_ordered_blocks
from vitrail.training.callback import Callback
from vitrail.training.checkpoint import Checkpoint
from vitrail.training.conclude import conclude
from vitrail.training.length import plan_steps
from vitrail.training.loop import Trainer
from vitrail.training.memory_estimate import check_memory, explain_shortage
from vitrail.training.objectives.illustration import illustrate
from vitrail.training.objectives.judgement import Judgement
from vitrail.training.observer import FinishedRun, ObserverFactory, RunInfo
from vitrail.training.options import Options
from vitrail.training.precision import describe_bfloat16_speed
from vitrail.training.ranks import Ranks, join_ranks
from vitrail.training.recipe import OBJECTIVES, Recipe, write_toml
from vitrail.training.resume import describe_resumption, resume
from vitrail.training.run_folder import RunFolder
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import StopReason
from vitrail.training.snapshots import Snapshots
from vitrail.training.starting_point import (
    RunContext,
    StartingPoint,
    make_preprocess,
    resolve_model,
    sample_training_images,
)
from vitrail.training.stop import StopSignal


class RunControls(TypedDict, total=False):
    """Keyword arguments of `run`, which `train` and `finetune` pass on to it."""

    resumes: bool
    """Whether to continue from the newest checkpoint in the folder."""
    force: bool
    """Whether to overwrite another run."""
    quiet: bool
    """Whether to print neither notes nor progress."""
    command: str
    """The command or call that started the run, for the log and the provenance."""
    callback: Callback | None
    """Called after every step."""
    licence: str | None
    """Licence of the weights; None: that of the data."""
    observers: Iterable[ObserverFactory]
    """Factories of observers, called on the first rank."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """The result of a run."""

    folder: Path | None
    """RUN, with config.toml, metrics.jsonl, checkpoints, bundle and report.html; None if it was temporary."""
    bundle: Bundle
    """The model, ready to use."""
    scores: dict[str, Any] | None
    """Scores on the test images, otherwise on the held-out images (see the key `split`). None without such images,
    or if the objective has no final evaluation."""
    sentence: str | None
    """The scores as a sentence."""
    steps: int
    """Number of steps done."""
    total: int
    """Number of steps that were planned; more than `steps` if the run was `stopped`."""
    stopped: StopReason | None
    """Reason for an end before the last step: patience or callback; None if the run was complete."""
    seconds: float
    """Duration of the run, including interrupted parts."""
    history: list[dict[str, Any]]
    """The events in metrics.jsonl, such as losses and held-out scores, each with its `event` and `step`."""
    is_first: bool = True
    """Whether this process is the first rank, which writes the folder."""

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test images, otherwise on the held-out images."""
        return None if self.scores is None else self.scores.get("accuracy")

    def __repr__(self) -> str:
        parts = [self.sentence] if self.sentence else []
        parts.append(f"{pluralise(self.steps, 'step')} in {self.seconds:.1f} s")
        if self.stopped is not None:
            parts.append(f"stopped by {self.stopped} before the last of {self.total:,}")
        parts += [] if self.folder is None else [str(self.folder)]
        return f"Result({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = [("scores", self.sentence)] if self.sentence else []
        rows.append(("length", f"{pluralise(self.steps, 'step')} in {self.seconds:.1f} s"))
        if self.stopped is not None:
            rows.append(("stopped", f"by {self.stopped} before the last of {self.total:,}"))
        rows += [] if self.folder is None else [("report", str(self.folder / "report.html"))]
        return card(self.bundle.model.config.name, rows, "vitrail.train") + self.bundle._repr_html_()


def train(
    data: AnyData,
    model: str,
    output: str | Path,
    recipe: Recipe,
    options: Options,
    **controls: Unpack[RunControls],
) -> Result:
    """Train the model named `model` from scratch on DATA and return the result; files are written to `output`.

    Notes and progress are printed to stderr unless `quiet` is set.
    """
    if recipe.head == "probe":
        raise UsageError(
            "Head must be zero when training from scratch, got probe. Use finetune for a head fitted by least squares."
        )

    def initialise(context: RunContext) -> StartingPoint:
        config = resolve_model(zoo.find(model), context.dataset, recipe)
        preprocess = make_preprocess(config, context.training, recipe)
        torch.manual_seed(options.seed)
        network = build(config)
        for layer in network.output_layers() if recipe.head_bias else ():
            if layer.bias is not None:
                torch.nn.init.constant_(layer.bias, recipe.head_bias)
        network.prepare(
            lambda count: sample_training_images(context.training, preprocess, count, options.seed), options.seed
        )
        return StartingPoint(network, preprocess, notes=zoo.alias_notes(model))

    return run(data, output, recipe, options, initialise, **controls)


def run(
    data: AnyData,
    output: str | Path,
    recipe: Recipe,
    options: Options,
    initialise: Callable[[RunContext], StartingPoint],
    *,
    resumes: bool = False,
    force: bool = False,
    quiet: bool = False,
    command: str = "",
    callback: Callback | None = None,
    licence: str | None = None,
    observers: Iterable[ObserverFactory] = (),
) -> Result:
    """Run a training from any starting point, which `initialise` builds, and return the result.

    The function claims the folder `output`, starts or resumes the training, evaluates the model and writes the bundle.
    """
    start_time = time.monotonic()
    folder = RunFolder(output, resumes=resumes, force=force)
    recipe.check_length()
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(options.device))
        tell = say if ranks.is_first and not quiet else say_nothing
        _set_threads(options, ranks, stack, tell)
        dataset, training, held_out = _open_training_data(data, recipe, options)
        is_resumed = _check_and_lock_folder(folder, ranks, stack)
        starting_point = initialise(RunContext(dataset, training, ranks, is_new=not is_resumed, tell=tell))
        recipe, decay_notes = _resolve_layer_decay(starting_point.model, recipe)
        trainer = _make_trainer(starting_point, dataset, (training, held_out), recipe, options, ranks, stack)
        if trainer.planned_steps != 0 and not is_resumed:
            check_memory(trainer)
        trainer.start_time = start_time
        trainer.loader.damaged |= starting_point.damaged

        config = _format_config(dataset, starting_point, recipe, options, command)
        is_new = ranks.run_on_first(lambda: folder.claim(config, stack, tell))
        fixed_settings = _fixed_settings(starting_point, dataset, recipe, options)
        data_text = shlex.join(data_arguments(data)) or "DATA"
        checkpoint, notes = (None, []) if is_new else resume(trainer, folder.path, fixed_settings, data_text)
        changes = []
        if checkpoint is not None:
            starting_point = dataclasses.replace(starting_point, origin=checkpoint.state["origin"])
            changes = _describe_changed_environment(checkpoint, options, ranks)
        else:
            if not is_new:  # the run was killed before its first checkpoint, so other settings are allowed
                ranks.run_on_first(lambda: folder.write_config(config))
            notes += _prepare_new_run(trainer, starting_point, start_time)

        starting_point = starting_point.with_licence(licence)
        if options.amp and trainer.step < trainer.total:
            notes.append(describe_bfloat16_speed(trainer))
        log = stack.enter_context(RunLog(folder.path, trainer.total, writes=ranks.is_first, tell=tell))
        if ranks.is_first:
            info = _make_run_info(folder.path, data, dataset, trainer, command, log)
            _add_observers(log, observers, info, trainer)
        stack.enter_context(log.report_failures(lambda: trainer.progress))
        stack.enter_context(explain_shortage(trainer))
        with StopSignal().catch() as stop:
            for note in (*dataset.notes, *starting_point.notes, *decay_notes, *notes, *changes):
                log.say(f"note: {note}")
            if checkpoint is not None:
                log.write("resume", step=trainer.step, exact=not changes)
                log.say(describe_resumption(trainer, folder.path, data_text))
            else:
                _log_start(log, starting_point, dataset, training, held_out, trainer)
            log.step(trainer.step)
            state = {**fixed_settings, **_environment(options, ranks), "origin": starting_point.origin}
            if trainer.total:
                trainer.fit(callback, log=log, checkpoints=folder.checkpoints, state=state, stop=stop)

        split = dataset.splits.get("test", held_out)
        bundle, judgement = conclude(trainer, starting_point, dataset, split, log, fixed_settings["data"], command)
        if ranks.is_first:
            _write_results(folder.path, dataset, trainer, bundle, judgement, split, log)
    return _make_result(folder.path, trainer, bundle, judgement)


def _set_threads(options: Options, ranks: Ranks, stack: contextlib.ExitStack, tell: Say) -> None:
    """Set the number of torch threads. When `stack` closes, it and torch's random state are restored."""
    if ranks.device.type != "cpu":
        tell(f"note: {describe_use(ranks.device)}")
    # Seed and number of threads are global to the process; the caller must find them unchanged.
    stack.enter_context(torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []))
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    if options.threads:
        torch.set_num_threads(options.threads)


def _open_training_data(data: AnyData, recipe: Recipe, options: Options) -> tuple[Dataset, Split, Split | None]:
    """Open DATA; return the data set, its training images and the held-out images (None if there are none)."""
    dataset = open_data(data)
    _check_labels(recipe, dataset)
    training, held_out = dataset.for_training(holdout=recipe.holdout, seed=options.seed, per_class=recipe.per_class)
    if recipe.patience is not None and held_out is None:
        raise UsageError(
            f"Patience must have held-out images to watch, got none of {dataset.name!r}. Add a val split, or use a"
            " holdout above 0 with at least two images of a class."
        )
    return dataset, training, held_out


def _check_and_lock_folder(folder: RunFolder, ranks: Ranks, stack: contextlib.ExitStack) -> bool:
    """Check the folder, lock it if it exists, and return whether the run resumes from a checkpoint in it.

    The lock is held by the first rank until `stack` closes. A folder that does not exist yet is locked by `claim`.
    """
    ranks.run_on_first(folder.check)
    ranks.run_on_first(lambda: folder.hold(stack) if folder.path.is_dir() else None)
    return ranks.run_on_first(lambda: folder.is_resumed)


def _make_trainer(
    starting_point: StartingPoint,
    dataset: Dataset,
    splits: tuple[Split, Split | None],
    recipe: Recipe,
    options: Options,
    ranks: Ranks,
    stack: contextlib.ExitStack,
) -> Trainer:
    """Return the trainer for `splits` (training, held-out). Its image cache is closed when `stack` closes."""
    training, held_out = splits
    cache = None
    if options.cache:
        cache = stack.enter_context(ImageCache(options.cache, int(options.cache_gigabytes * 1e9)))
    if ranks.device.type == "cpu" and recipe.steps != 0:
        copies = bool(recipe.average) + (not recipe.freeze)  # the running average, and the gradients
        check_allocation(
            4 * starting_point.model.config.parameters * copies, f"Training of {starting_point.model.config.name}"
        )
    return Trainer(
        starting_point.model,
        starting_point.preprocess,
        training,
        held_out,
        recipe,
        options,
        ranks,
        labels=dataset.labels,
        learned=starting_point.learned,
        cache=cache,
    )


def _fixed_settings(
    starting_point: StartingPoint, dataset: Dataset, recipe: Recipe, options: Options
) -> dict[str, Any]:
    """Return the settings that must be equal when a run is resumed; checkpoints store them."""
    return {
        "bundle": starting_point.source,
        "seed": options.seed,
        "model": starting_point.model.config.to_document(),
        "preprocess": starting_point.preprocess.to_json(),
        "recipe": recipe.to_json(),
        "corrections": "none" if dataset.corrections is None else dataset.corrections.sha256[:12],
        "data": dataset.fingerprint(),
    }


def _prepare_new_run(trainer: Trainer, starting_point: StartingPoint, start_time: float) -> list[str]:
    """Evaluate the starting point of a new run if it has a fitted head, and set the number of steps. Return notes."""
    trainer.rate_scale = starting_point.rate_scale
    with explain_shortage(trainer):
        if starting_point.probe is not None and trainer.planned_steps != 0:
            trainer.evaluate_starting_point()
        trainer.total, note = plan_steps(trainer, starting_point, start_time)
    return [note] if note else []


def _make_run_info(
    folder: Path, data: AnyData, dataset: Dataset, trainer: Trainer, command: str, log: RunLog
) -> RunInfo:
    objective = trainer.objective
    return RunInfo(
        folder=folder,
        data=data_arguments(data),
        dataset=dataset,
        command=command,
        model=trainer.kept_model.config,
        watched=objective.watched,
        watched_name=objective.watched_name,
        korean=objective.korean,
        peak_learning_rate=trainer.peak_learning_rate,
        steps_per_epoch=trainer.loader.steps,
        say=log.say,
    )


def _add_observers(log: RunLog, observers: Iterable[ObserverFactory], info: RunInfo, trainer: Trainer) -> None:
    if trainer.options.snapshots:
        labels = info.dataset.labels if trainer.objective.classifies else None
        log.add_observer(Snapshots(trainer, info.folder / "snapshots", labels))
    for make in observers:
        log.add_observer(make(info))


def _write_results(
    folder: Path,
    dataset: Dataset,
    trainer: Trainer,
    bundle: Bundle,
    judgement: Judgement | None,
    split: Split | None,
    log: RunLog,
) -> None:
    """Write the bundle and the predictions of the final evaluation, and notify the observers."""
    save(bundle, folder / "bundle", force=True)
    if judgement is not None and (predictions := judgement.to_saved_predictions(dataset)) is not None:
        predictions.write(folder / PREDICTIONS_FILE, force=True)
    final_split = trainer.loader.split if split is None else split
    objective = trainer.kept_objective
    log.finish(
        FinishedRun(
            bundle=bundle,
            judgement=judgement,
            split=final_split,
            illustrate=lambda: illustrate(objective, bundle.preprocess, final_split),
        )
    )
    log.write("end", step=trainer.step, seconds=bundle.provenance["seconds"])


def _make_result(folder: Path, trainer: Trainer, bundle: Bundle, judgement: Judgement | None) -> Result:
    is_first = trainer.ranks.is_first
    return Result(
        folder=folder,
        bundle=bundle,
        scores=bundle.provenance.get("scores"),
        sentence=None if judgement is None else judgement.sentence,
        steps=trainer.step,
        total=trainer.total,
        stopped=trainer.stopped,
        seconds=bundle.provenance["seconds"],
        history=read_events(folder / "metrics.jsonl") if is_first else [],
        is_first=is_first,
    )


def _resolve_layer_decay(model: AnyModel, recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return the recipe with a layer decay that the model supports, and a note if this changes the recipe."""
    if recipe.layer_decay == 1 or has_ordered_blocks(model.roles()):
        return recipe, []
    note = (
        f"layer_decay is 1 instead of {recipe.layer_decay:g}: a model of the family {model.config.family} is not one"
        " sequence of blocks, so all layers use the same learning rate"
    )
    return recipe.replace(layer_decay=1.0), [note]


def _check_labels(recipe: Recipe, dataset: Dataset) -> None:
    """Raise UsageError if the data has several labels per image and the objective one class, or vice versa."""
    objective = OBJECTIVES[recipe.objective]
    if dataset.is_multilabel and objective.classifies and not objective.is_multilabel:
        raise UsageError(
            f"Objective must be multilabel for data with several labels per image, got {recipe.objective}. Use --set"
            " objective=multilabel."
        )
    if objective.is_multilabel and not dataset.is_multilabel:
        raise UsageError(
            f"Objective {recipe.objective} must have data with several labels per image (a .csv file with the header"
            f" file,labels), got one class per image in {dataset.name!r}."
        )


def _environment(options: Options, ranks: Ranks) -> dict[str, Any]:
    """Return the threads, ranks, device and versions on which the last bits of the weights depend."""
    return {
        "threads": torch.get_num_threads(),
        "ranks": ranks.count,
        "device": ranks.device.type,
        "amp": options.amp,
        "compile": options.compile,
        "torch": str(torch.__version__),
    }


def _describe_changed_environment(checkpoint: Checkpoint, options: Options, ranks: Ranks) -> list[str]:
    """Restore the number of threads of the checkpoint, unless the options set it.

    Return a note for each other difference from the environment in which the run started.
    """
    state = checkpoint.state
    if options.threads is None:
        torch.set_num_threads(state["threads"])
    return [
        f"{name} is {value} after {state[name]}: the last bits of the weights will differ"
        for name, value in _environment(options, ranks).items()
        if state[name] != value
    ]


def _format_config(
    dataset: Dataset, starting_point: StartingPoint, recipe: Recipe, options: Options, command: str
) -> str:
    """Format all settings of the run, including defaults, as the text of config.toml.

    Settings that are None are omitted, because TOML has no null; None is their default.
    """
    fields = {
        "data": dataset.name,
        **({} if dataset.corrections is None else {"corrections": dataset.corrections.path}),
        **options.to_json(),
        **recipe.to_json(),
        "preprocess": starting_point.preprocess.to_json(),
        "model": starting_point.model.config.to_document(),
    }
    title = " ".join(command.removeprefix("vitrail ").split()) or "in Python"
    return f"{title}\n# version {__version__}, torch {torch.__version__}\n{write_toml(fields)}"


def _log_start(
    log: RunLog,
    starting_point: StartingPoint,
    dataset: Dataset,
    training: Split,
    held_out: Split | None,
    trainer: Trainer,
) -> None:
    """Log the start of a new run and print a summary of model, data and length."""
    numbers = {"total": trainer.total, "seed": trainer.options.seed, "threads": torch.get_num_threads()}
    log.write("start", step=0, **numbers, freeze=trainer.recipe.freeze)
    if starting_point.probe is not None:
        log.write("probe", step=0, **starting_point.probe)
    if trainer.starting_scores is not None and trainer.starting_scores["count"]:
        trainer.log_evaluation(0, trainer.starting_scores, log)
    config = starting_point.model.config
    height, width = config.resolution
    held_out_count = f", {len(held_out):,} held out" if held_out is not None else ""
    epochs = trainer.total / trainer.loader.steps
    log.say(
        f"{config.name or config.family}: {config.parameters:,} parameters, {height} x {width} px,"
        f" {pluralise(config.channels, 'channel')};"
        f" {len(training):,} images of {len(dataset.labels):,} classes{held_out_count};"
        + (
            f" {pluralise(trainer.total, 'step')} of {trainer.recipe.batch} ({pluralise(epochs, 'epoch')})"
            if trainer.total
            else " no steps"
        )
    )
    if 0 < trainer.total <= trainer.recipe.warmup:
        log.say(f"note: the warm-up of {trainer.recipe.warmup:g} steps is longer than the run of {trainer.total}")
