"""A run, from DATA and a model to a folder with a bundle and a report."""

import contextlib
import dataclasses
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
from vitrail.data.sources.registry import AnyData, open_data
from vitrail.evaluation.history import read_events
from vitrail.evaluation.predictions.saved_predictions import PREDICTIONS_FILE as ANSWERS
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
from vitrail.training.ranks import Ranks, join
from vitrail.training.recipe import OBJECTIVES, Recipe, write_toml
from vitrail.training.resume import resume
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
    """Keywords of `run`, which the functions that train pass on."""

    resumes: bool
    """Whether to continue from the newest checkpoint in the folder."""
    force: bool
    """Whether to overwrite another run."""
    quiet: bool
    """Print no notes and no progress."""
    command: str
    """How the run was started, for the record."""
    callback: Callback | None
    """Called after every step."""
    observers: Iterable[ObserverFactory]
    """Made on the first rank."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """The result of a run."""

    folder: Path | None
    """RUN, with config.toml, metrics.jsonl, checkpoints, bundle and report.html; None if it was temporary."""
    bundle: Bundle
    """The model, ready to use."""
    scores: dict[str, Any] | None
    """Scores on the test images, otherwise on the held-out ones (see `split`); None if there are neither, or if the
    objective has no final evaluation."""
    sentence: str | None
    """The scores as a sentence."""
    steps: int
    """Number of steps done."""
    total: int
    """Number of steps of the whole length; more than `steps` if the run was `stopped`."""
    stopped: StopReason | None
    """What ended the run before its last step: patience, callback or nothing."""
    seconds: float
    """Duration of the run, including interrupted parts."""
    history: list[dict[str, Any]]
    """The lines of metrics.jsonl: losses, held-out scores and the rest, each with its `event` and `step`."""
    is_first: bool = True
    """Whether this process wrote the folder: with several ranks, one of them does."""

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test images, otherwise on the held-out ones."""
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
    """Train a model of this name from scratch. Only notes and progress are printed, to stderr, unless `quiet`."""
    if recipe.head == "probe":
        raise UsageError("Head must be zero where a model begins with its first weights, got probe. See finetune.")

    def initialise(given: RunContext) -> StartingPoint:
        config = resolve_model(zoo.find(model), given.dataset, recipe)
        preprocess = make_preprocess(config, given.training, recipe)
        torch.manual_seed(options.seed)
        network = build(config)
        if recipe.head_bias and network.head.bias is not None:
            torch.nn.init.constant_(network.head.bias, recipe.head_bias)
        network.prepare(
            lambda count: sample_training_images(given.training, preprocess, count, options.seed), options.seed
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
    observers: Iterable[ObserverFactory] = (),
) -> Result:
    """A run from any initial model: claim the folder, begin or resume, train, evaluate, write the bundle."""
    began = time.monotonic()
    folder = RunFolder(output, resumes=resumes, force=force)
    recipe.check_length()
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join(options.device))
        tell = say if ranks.is_first and not quiet else say_nothing
        _use_threads(options, ranks, stack, tell)
        dataset, training, held_out = _open(data, recipe, options)
        goes_on = _resumes(folder, ranks, stack)
        initial = initialise(RunContext(dataset, training, ranks, is_new=not goes_on, tell=tell))
        recipe, decay_notes = _decay_for(initial.model, recipe)
        trainer = _make_trainer(initial, dataset, (training, held_out), recipe, options, ranks, stack)
        if trainer.planned_steps != 0 and not goes_on:
            check_memory(trainer)
        trainer.began = began
        trainer.loader.damaged |= initial.damaged

        config = _config(dataset, initial, recipe, options, command)
        is_new = ranks.run_on_first(lambda: folder.claim(config, stack, tell))
        agreed = _agreed(initial, dataset, recipe, options)
        checkpoint, notes = (None, []) if is_new else resume(trainer, folder.path, agreed)
        changes = []
        if checkpoint is not None:
            initial = dataclasses.replace(initial, origin=checkpoint.state["origin"])
            changes = _changes(checkpoint, options, ranks)
        else:
            if not is_new:  # it was killed before its first checkpoint, and may be another run now
                ranks.run_on_first(lambda: folder.write_config(config))
            notes += _prepare(trainer, initial, began)

        if options.amp and trainer.step < trainer.total:
            notes.append(describe_bfloat16_speed(trainer))
        log = stack.enter_context(RunLog(folder.path, trainer.total, writes=ranks.is_first, tell=tell))
        if ranks.is_first:
            info = _info(folder.path, data, dataset, trainer, command, log)
            _add_observers(log, observers, info, trainer)
        stack.enter_context(log.failures(lambda: trainer.progress))
        stack.enter_context(explain_shortage(trainer))
        with StopSignal().catch() as stop:
            for note in (*dataset.notes, *initial.notes, *decay_notes, *notes, *changes):
                log.say(f"note: {note}")
            if checkpoint is not None:
                log.write("resume", step=trainer.step, exact=not changes)
                log.say(_goes_on(trainer))
            else:
                _introduce(log, initial, dataset, training, held_out, trainer)
            log.step(trainer.step)
            state = {**agreed, **_circumstances(options, ranks), "origin": initial.origin}
            if trainer.total:
                trainer.fit(callback, log=log, checkpoints=folder.checkpoints, state=state, stop=stop)

        split = dataset.splits.get("test", held_out)
        bundle, judgement = conclude(trainer, initial, dataset, split, log, agreed["data"], command)
        if ranks.is_first:
            _write_results(folder.path, dataset, trainer, bundle, judgement, split, log)
    return _result(folder.path, trainer, bundle, judgement)


def _use_threads(options: Options, ranks: Ranks, stack: contextlib.ExitStack, tell: Say) -> None:
    """Set the number of threads until `stack` ends, and restore torch's random numbers then."""
    if ranks.device.type != "cpu":
        tell(f"note: {describe_use(ranks.device)}")
    # The seed and the number of threads belong to the process: whoever called finds them as they were.
    stack.enter_context(torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []))
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    if options.threads:
        torch.set_num_threads(options.threads)


def _open(data: AnyData, recipe: Recipe, options: Options) -> tuple[Dataset, Split, Split | None]:
    """The data set, its training images and the held-out ones."""
    dataset = open_data(data)
    _check_labels(recipe, dataset)
    training, held_out = dataset.for_training(holdout=recipe.holdout, seed=options.seed, per_class=recipe.per_class)
    if recipe.patience is not None and held_out is None:
        raise UsageError(
            f"Patience must have held-out images to watch, got none of {dataset.name!r}: give it a val split, or a"
            " holdout above 0 and two images of a class."
        )
    return dataset, training, held_out


def _resumes(folder: RunFolder, ranks: Ranks, stack: contextlib.ExitStack) -> bool:
    """Check the folder, and return whether the run resumes from a checkpoint in it.

    The first rank holds the folder to the end of the run: from now on if it exists, otherwise from its claim.
    """
    ranks.run_on_first(folder.check)
    ranks.run_on_first(lambda: folder.hold(stack) if folder.path.is_dir() else None)
    return ranks.run_on_first(lambda: folder.goes_on)


def _make_trainer(
    initial: StartingPoint,
    dataset: Dataset,
    splits: tuple[Split, Split | None],
    recipe: Recipe,
    options: Options,
    ranks: Ranks,
    stack: contextlib.ExitStack,
) -> Trainer:
    """The trainer of the training and the held-out split; its cache is closed when `stack` ends."""
    training, held_out = splits
    cache = None
    if options.cache:
        cache = stack.enter_context(ImageCache(options.cache, int(options.cache_gigabytes * 1e9)))
    if ranks.device.type == "cpu" and recipe.steps != 0:
        copies = bool(recipe.average) + (not recipe.freeze)  # the average, and gradients
        check_allocation(4 * initial.model.config.parameters * copies, f"Training of {initial.model.config.name}")
    return Trainer(
        initial.model,
        initial.preprocess,
        training,
        held_out,
        recipe,
        options,
        ranks,
        labels=dataset.labels,
        learned=initial.learned,
        cache=cache,
    )


def _agreed(initial: StartingPoint, dataset: Dataset, recipe: Recipe, options: Options) -> dict[str, Any]:
    """Settings that a resumed run must have."""
    return {
        "bundle": initial.source,
        "seed": options.seed,
        "model": initial.model.config.to_document(),
        "preprocess": initial.preprocess.to_json(),
        "recipe": recipe.to_json(),
        "data": dataset.fingerprint(),
    }


def _prepare(trainer: Trainer, initial: StartingPoint, began: float) -> list[str]:
    """Before the first step of a new run: the scores of its initial model, and its length. Returns notes."""
    trainer.rate_scale = initial.rate_scale
    with explain_shortage(trainer):
        if initial.probe is not None and trainer.planned_steps != 0:
            trainer.evaluate_starting_point()
        trainer.total, note = plan_steps(trainer, initial, began)
    return [note] if note else []


def _info(folder: Path, data: AnyData, dataset: Dataset, trainer: Trainer, command: str, log: RunLog) -> RunInfo:
    objective = trainer.objective
    return RunInfo(
        folder=folder,
        data=str(data) if isinstance(data, str | Path) else None,
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
        log.add(Snapshots(trainer, info.folder / "snapshots", labels))
    for make in observers:
        log.add(make(info))


def _write_results(
    folder: Path,
    dataset: Dataset,
    trainer: Trainer,
    bundle: Bundle,
    judgement: Judgement | None,
    split: Split | None,
    log: RunLog,
) -> None:
    """Write the bundle and its predictions, and tell the observers."""
    save(bundle, folder / "bundle", force=True)
    if judgement is not None and (answers := judgement.answers_to(dataset)) is not None:
        answers.write(folder / ANSWERS, force=True)
    shown = trainer.loader.split if split is None else split
    objective = trainer.kept_objective
    log.finish(
        FinishedRun(
            bundle=bundle,
            judgement=judgement,
            split=shown,
            illustrate=lambda: illustrate(objective, bundle.preprocess, shown),
        )
    )
    log.write("end", step=trainer.step, seconds=bundle.provenance["seconds"])


def _result(folder: Path, trainer: Trainer, bundle: Bundle, judgement: Judgement | None) -> Result:
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


def _goes_on(trainer: Trainer) -> str:
    where = f"after step {trainer.step} of {trainer.total}"
    return f"going on {where}" if trainer.stopped is None else f"ended {where} by {trainer.stopped}: it does not go on"


def _decay_for(model: AnyModel, recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with the layer decay that the model can have, and a note if that is another one."""
    if recipe.layer_decay == 1 or has_ordered_blocks(model.roles()):
        return recipe, []
    note = (
        f"layer_decay is 1 instead of {recipe.layer_decay:g}: a model of the family {model.config.family} is not one"
        " sequence of blocks, so all layers have the same learning rate"
    )
    return recipe.replace(layer_decay=1.0), [note]


def _check_labels(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse several labels an image for an objective of one class, and the other way round."""
    objective = OBJECTIVES[recipe.objective]
    if dataset.is_multilabel and objective.classifies and not objective.several:
        raise UsageError(
            f"Objective must be multilabel for data with several labels an image, got {recipe.objective}. Use --set"
            " objective=multilabel."
        )
    if objective.several and not dataset.is_multilabel:
        raise UsageError(
            f"Objective {recipe.objective} must have data with several labels an image (a .csv file with the header"
            f" file,labels), got one class for each in {dataset.name!r}."
        )


def _circumstances(options: Options, ranks: Ranks) -> dict[str, Any]:
    """What the last bits of a run depend on, besides its settings."""
    return {
        "threads": torch.get_num_threads(),
        "ranks": ranks.count,
        "device": ranks.device.type,
        "amp": options.amp,
        "compile": options.compile,
        "torch": str(torch.__version__),
    }


def _changes(checkpoint: Checkpoint, options: Options, ranks: Ranks) -> list[str]:
    """Set the number of threads that the run began with, unless another one is given. Returns what else has changed, in
    words."""
    before = checkpoint.state
    if options.threads is None:
        torch.set_num_threads(before["threads"])
    return [
        f"{name} is {value} after {before[name]}: the last bits of the weights will differ"
        for name, value in _circumstances(options, ranks).items()
        if before[name] != value
    ]


def _config(dataset: Dataset, initial: StartingPoint, recipe: Recipe, options: Options, command: str) -> str:
    """All settings of the run, with defaults filled in, as TOML."""
    # A value that is none has no word in TOML and is left out: it is the default.
    fields = {
        "data": dataset.name,
        **options.to_json(),
        **recipe.to_json(),
        "preprocess": initial.preprocess.to_json(),
        "model": initial.model.config.to_document(),
    }
    words = " ".join(command.removeprefix("vitrail ").split()) or "in Python"
    return f"{words}\n# version {__version__}, torch {torch.__version__}\n{write_toml(fields)}"


def _introduce(
    log: RunLog, initial: StartingPoint, dataset: Dataset, training: Split, held_out: Split | None, trainer: Trainer
) -> None:
    """Log the start of a new run."""
    numbers = {"total": trainer.total, "seed": trainer.options.seed, "threads": torch.get_num_threads()}
    log.write("start", step=0, **numbers, freeze=trainer.recipe.freeze)
    if initial.probe is not None:
        log.write("probe", step=0, **initial.probe)
    if trainer.starting_scores is not None and trainer.starting_scores["count"]:
        trainer.log_evaluation(0, trainer.starting_scores, log)
    config = initial.model.config
    height, width = config.resolution
    watched = f", {len(held_out):,} held out" if held_out is not None else ""
    epochs = trainer.total / trainer.loader.steps
    log.say(
        f"{config.name or config.family}: {config.parameters:,} parameters, {height} x {width} px,"
        f" {pluralise(config.channels, 'channel')};"
        f" {len(training):,} images of {len(dataset.labels):,} classes{watched};"
        + (
            f" {pluralise(trainer.total, 'step')} of {trainer.recipe.batch} ({pluralise(epochs, 'epoch')})"
            if trainer.total
            else " no steps"
        )
    )
    if 0 < trainer.total <= trainer.recipe.warmup:
        log.say(f"note: the warm-up of {trainer.recipe.warmup:g} steps is longer than the run of {trainer.total}")
