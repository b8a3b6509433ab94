"""A run, from DATA and a model to a folder with a bundle and a report."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitrail import __version__
from vitrail.bundles.bundle import Bundle, save
from vitrail.core.errors import UsageError
from vitrail.core.files import writable
from vitrail.core.memory import check_room
from vitrail.core.notebook import card
from vitrail.core.settings import counted
from vitrail.core.terminal import say, say_nothing
from vitrail.data.cache import ImageCache
from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources.registry import AnyData, open_data
from vitrail.evaluation.history import LINEAR_HEAD
from vitrail.evaluation.predictions.saved import NAME as ANSWERS
from vitrail.models import zoo
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.models.device import describe_use
from vitrail.reports.run_report import Report, read_events
from vitrail.training.callback import Callback
from vitrail.training.checkpoint import Checkpoint
from vitrail.training.keep_best import Choice, choose
from vitrail.training.loop import Trainer
from vitrail.training.memory_estimate import check_memory, explain_shortage
from vitrail.training.objectives.base import Judgement
from vitrail.training.options import Options
from vitrail.training.precision import note_on_bfloat16
from vitrail.training.ranks import Ranks, join
from vitrail.training.recipe import OBJECTIVES, Recipe, write_toml
from vitrail.training.resume import resume
from vitrail.training.run_folder import RunFolder
from vitrail.training.run_log import RunLog
from vitrail.training.run_state import Ending
from vitrail.training.starting_point import Given, Initial, make_preprocess, resolve_model, some_images
from vitrail.training.stop import Stop

_FITTED = 1000  # training images that tell how well they are learned


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
    stopped: Ending | None
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
        parts.append(f"{counted(self.steps, 'step')} in {self.seconds:.1f} s")
        if self.stopped is not None:
            parts.append(f"stopped by {self.stopped} before the last of {self.total:,}")
        parts += [] if self.folder is None else [str(self.folder)]
        return f"Result({'; '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = [("scores", self.sentence)] if self.sentence else []
        rows.append(("length", f"{counted(self.steps, 'step')} in {self.seconds:.1f} s"))
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
    *,
    resumes: bool = False,
    force: bool = False,
    quiet: bool = False,
    command: str = "",
    callback: Callback | None = None,
) -> Result:
    """Train a model of this name from scratch. Only notes and progress are printed, to stderr, unless `quiet`."""
    if recipe.head == "probe":
        raise UsageError("Head must be zero where a model begins with its first weights, got probe. See finetune.")

    def initialise(given: Given) -> Initial:
        config = resolve_model(zoo.find(model), given.dataset, recipe)
        preprocess = make_preprocess(config, given.training, recipe)
        torch.manual_seed(options.seed)
        made = build(config)
        if recipe.head_bias and made.head.bias is not None:
            torch.nn.init.constant_(made.head.bias, recipe.head_bias)
        made.prepare(lambda count: some_images(given.training, preprocess, count, options.seed), options.seed)
        return Initial(made, preprocess, notes=zoo.alias_notes(model))

    folder = RunFolder(output, resumes=resumes, force=force)
    return run(data, folder, recipe, options, initialise, quiet=quiet, command=command, callback=callback)


def run(
    data: AnyData,
    folder: RunFolder,
    recipe: Recipe,
    options: Options,
    initialise: Callable[[Given], Initial],
    *,
    quiet: bool,
    command: str,
    callback: Callback | None = None,
) -> Result:
    """A run from any initial model: claim the folder, begin or resume, train, evaluate, write the bundle and the
    report."""
    began = time.monotonic()
    recipe.check_length()
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join(options.device))
        tell = say if ranks.is_first and not quiet else say_nothing
        if ranks.device.type != "cpu":
            tell(f"note: {describe_use(ranks.device)}")
        # The seed and the number of threads belong to the process: whoever called finds them as they were.
        stack.enter_context(torch.random.fork_rng([ranks.device] if ranks.device.type == "cuda" else []))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if options.threads:
            torch.set_num_threads(options.threads)
        dataset = open_data(data)
        _check_labels(recipe, dataset)
        training, held_out = dataset.for_training(holdout=recipe.holdout, seed=options.seed, per_class=recipe.per_class)
        if recipe.patience is not None and held_out is None:
            raise UsageError(
                f"Patience must have held-out images to watch, got none of {dataset.name!r}: give it a val split, or a"
                " holdout above 0 and two images of a class."
            )

        # The folder is held by the first rank to the end of the run: from now on if it exists, else from its claim.
        ranks.first_does(folder.check)
        ranks.first_does(lambda: folder.hold(stack) if folder.path.is_dir() else None)
        goes_on = ranks.first_does(lambda: folder.goes_on)

        initial = initialise(Given(dataset, training, ranks, is_new=not goes_on, tell=tell))
        recipe, decay_notes = _decay_for(initial.model, recipe)
        cache = None
        if options.cache:
            cache = stack.enter_context(ImageCache(options.cache, int(options.cache_gigabytes * 1e9)))
        if ranks.device.type == "cpu" and recipe.steps != 0:
            copies = bool(recipe.average) + (not recipe.freeze)  # the average, and gradients
            check_room(4 * initial.model.config.parameters * copies, f"Training of {initial.model.config.name}")
        trainer = Trainer(
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
        if trainer.planned != 0 and not goes_on:
            check_memory(trainer)
        trainer.began = began
        trainer.loader.damaged |= initial.damaged

        config = _config(dataset, initial, recipe, options, command)
        is_new = ranks.first_does(lambda: folder.claim(config, stack, tell))
        agreed = {
            "bundle": initial.source,
            "seed": options.seed,
            "model": initial.model.config.to_document(),
            "preprocess": initial.preprocess.to_json(),
            "recipe": recipe.to_json(),
            "data": dataset.fingerprint(),
        }
        checkpoint, notes = (None, []) if is_new else resume(trainer, folder.path, agreed)
        changes = []
        if checkpoint is not None:
            initial = dataclasses.replace(initial, origin=checkpoint.state["origin"])
            changes = _changes(checkpoint, options, ranks)
        else:
            if not is_new:  # it was killed before its first checkpoint, and may be another run now
                ranks.first_does(lambda: folder.write_config(config))
            trainer.rate_scale = initial.rate_scale
            with explain_shortage(trainer):
                if initial.probe is not None and trainer.planned != 0:
                    trainer.remember_initial()
                trainer.total, note = _length(trainer, initial, began)
            notes += [note] if note else []

        if options.amp and trainer.step < trainer.total:
            notes.append(note_on_bfloat16(trainer))
        log = stack.enter_context(RunLog(folder.path, trainer.total, writes=ranks.is_first, tell=tell))
        typed = str(data) if isinstance(data, str | Path) else None
        report = stack.enter_context(Report(folder.path, typed, dataset, trainer, log, command))
        stack.enter_context(explain_shortage(trainer))
        with Stop().watching() as stop:
            for note in (*dataset.notes, *initial.notes, *decay_notes, *notes, *changes):
                log.say(f"note: {note}")
            if checkpoint is not None:
                log.write("resume", step=trainer.step, exact=not changes)
                log.say(_goes_on(trainer))
            else:
                _introduce(log, initial, dataset, training, held_out, trainer)
            state = {**agreed, **_circumstances(options, ranks), "origin": initial.origin}
            snapshots = _snapshots(trainer, folder, dataset)
            trainer.run(folder.path, log, state, stop, snapshots, report.update, callback)

        split = dataset.splits.get("test", held_out)
        bundle, judgement = _conclude(trainer, initial, dataset, split, log, agreed["data"], command)
        if ranks.is_first:
            save(bundle, folder.path / "bundle", force=True)
            if judgement is not None and (answers := judgement.answers_to(dataset)) is not None:
                answers.write(folder.path / ANSWERS, force=True)
            report.finish(bundle, judgement, training if split is None else split)
            log.write("end", step=trainer.step, seconds=bundle.provenance["seconds"])
    return Result(
        folder=folder.path,
        bundle=bundle,
        scores=bundle.provenance.get("scores"),
        sentence=None if judgement is None else judgement.sentence,
        steps=trainer.step,
        total=trainer.total,
        stopped=trainer.stopped,
        seconds=bundle.provenance["seconds"],
        history=read_events(folder.path / "metrics.jsonl") if ranks.is_first else [],
        is_first=ranks.is_first,
    )


def _conclude(
    trainer: Trainer,
    initial: Initial,
    dataset: Dataset,
    split: Split | None,
    log: RunLog,
    fingerprint: str,
    command: str,
) -> tuple[Bundle, Judgement | None]:
    """After the last step: the weights to keep, their final evaluation on `split`, the bundle."""
    is_best = trainer.return_to_best()
    choice = choose(trainer, initial, log)
    judgement = _judge(trainer, split, log)
    # Only the first rank has the judgement, but all of them must evaluate.
    fitted = _fitted(trainer) if trainer.ranks.from_first(judgement is not None) else {}
    scores = None
    if judgement is not None and split is not None:
        scores = {"split": split.name, **judgement.scores, **fitted}
        log.write("final", step=trainer.step, **scores)
    bundle = Bundle(
        model=trainer.kept.eval(),
        answer=trainer.kept_objective.answer(trainer.watch, trainer.ranks),
        preprocess=trainer.preprocess,
        labels=dataset.labels if trainer.objective.classifies else None,
        provenance=_provenance(trainer, initial, dataset, fingerprint, choice, scores, command, is_best=is_best),
    )
    return bundle, judgement


def _goes_on(trainer: Trainer) -> str:
    where = f"after step {trainer.step} of {trainer.total}"
    return f"going on {where}" if trainer.stopped is None else f"ended {where} by {trainer.stopped}: it does not go on"


def _decay_for(model: AnyModel, recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with the layer decay that the model can have, and a note if that is another one."""
    if recipe.layer_decay == 1 or model.has_ordered_blocks:
        return recipe, []
    note = (
        f"layer_decay is 1 instead of {recipe.layer_decay:g}: a model of the family {model.config.family} is not one"
        " sequence of blocks, so all layers have the same learning rate"
    )
    return recipe.replace(layer_decay=1.0), [note]


def _check_labels(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse several labels an image for an objective of one class, and the other way round."""
    objective = OBJECTIVES[recipe.objective]
    if dataset.several and objective.classifies and not objective.several:
        raise UsageError(
            f"Objective must be multilabel for data with several labels an image, got {recipe.objective}. Use --set"
            " objective=multilabel."
        )
    if objective.several and not dataset.several:
        raise UsageError(
            f"Objective {recipe.objective} must have data with several labels an image (a .csv file with the header"
            f" file,labels), got one class for each in {dataset.name!r}."
        )


def _length(trainer: Trainer, initial: Initial, began: float) -> tuple[int, str | None]:
    """Number of steps of a run, and a note if there are too few to train."""
    recipe = trainer.recipe
    if trainer.planned is not None:
        return trainer.planned, None
    minutes = recipe.minutes or 0.0
    steps = int(trainer.ranks.from_first(trainer.measure(60 * minutes - (time.monotonic() - began))))
    if initial.probe is None or steps >= recipe.least_steps:
        return steps, None
    return 0, (
        f"{counted(steps, 'step')} would fit into {counted(minutes, 'minute')}; below {recipe.least_steps},"
        f" the {LINEAR_HEAD} is kept as it is (more minutes, or a lower resolution, change that)"
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


def _config(dataset: Dataset, initial: Initial, recipe: Recipe, options: Options, command: str) -> str:
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
    log: RunLog, initial: Initial, dataset: Dataset, training: Split, held_out: Split | None, trainer: Trainer
) -> None:
    """Log the start of a new run."""
    numbers = {"total": trainer.total, "seed": trainer.options.seed, "threads": torch.get_num_threads()}
    log.write("start", step=0, **numbers, freeze=trainer.recipe.freeze)
    if initial.probe is not None:
        log.write("probe", step=0, **initial.probe)
    if trainer.initial_scores is not None and trainer.initial_scores["count"]:
        trainer.write_evaluation(0, trainer.initial_scores, log)
    config = initial.model.config
    height, width = config.resolution
    watched = f", {len(held_out):,} held out" if held_out is not None else ""
    epochs = trainer.total / trainer.loader.steps
    log.say(
        f"{config.name or config.family}: {config.parameters:,} parameters, {height} x {width} px,"
        f" {counted(config.channels, 'channel')};"
        f" {len(training):,} images of {len(dataset.labels):,} classes{watched};"
        + (
            f" {counted(trainer.total, 'step')} of {trainer.recipe.batch} ({counted(epochs, 'epoch')})"
            if trainer.total
            else " no steps"
        )
    )
    if 0 < trainer.total <= trainer.recipe.warmup:
        log.say(f"note: the warm-up of {trainer.recipe.warmup:g} steps is longer than the run of {trainer.total}")


def _judge(trainer: Trainer, split: Split | None, log: RunLog) -> Judgement | None:
    """The final evaluation of the kept model."""
    if split is None:
        return None
    loader = trainer.load_to_evaluate(split)
    judgement = trainer.kept_objective.judge(loader, trainer.ranks)
    trainer.collect_damage(log, loader)
    return judgement


def _fitted(trainer: Trainer) -> dict[str, Any]:
    """How well the kept model does on images that it was trained on, beside which its scores tell overfitting."""
    if not trainer.objective.classifies:
        return {}
    found = trainer.examine_on(trainer.load_to_evaluate(trainer.loader.split.spread(_FITTED)))
    return {f"training_{trainer.objective.watched}": found[trainer.objective.watched]}


def _snapshots(trainer: Trainer, folder: RunFolder, dataset: Dataset) -> Callable[[], None] | None:
    """What writes the model as it is into RUN/snapshots; None if none are asked for."""
    if not trainer.options.snapshots:
        return None

    def write() -> None:
        labels = dataset.labels if trainer.objective.classifies else None
        provenance = {"objective": trainer.recipe.objective, "steps": trainer.step, "vitrail": __version__}
        bundle = Bundle(
            model=trainer.kept,
            preprocess=trainer.preprocess,
            labels=labels,
            provenance=provenance,
            answer=trainer.kept_objective.answer(None, trainer.ranks),
        )
        save(bundle, folder.path / "snapshots" / f"step-{trainer.step:09d}", force=True)

    return write


def _provenance(
    trainer: Trainer,
    initial: Initial,
    dataset: Dataset,
    fingerprint: str,
    choice: Choice | None,
    scores: dict[str, Any] | None,
    command: str,
    *,
    is_best: bool,
) -> dict[str, Any]:
    """Provenance of the bundle."""
    recipe = trainer.recipe
    provenance = {
        "data": f"{writable(dataset.name)}: {len(trainer.loader.split):,} training images",
        "data_fingerprint": fingerprint,
        "training_fingerprint": dataset.splits.get("train", dataset.first).content_fingerprint(),
        "licence": dataset.licence,
        "objective": recipe.objective,
        "weights": _which_weights(trainer, initial, choice, is_best=is_best),
        **({} if choice is None else {"choice": choice.reason}),
        "steps": trainer.step,
        **({} if trainer.stopped is None else {"stopped": f"by {trainer.stopped}, of {trainer.total} steps"}),
        "epochs": round(trainer.step / trainer.loader.steps, 3),
        "seed": trainer.options.seed,
        # Which images were held out: `evaluation.splits` finds them again.
        **({} if "val" in dataset.splits else {"holdout": float(recipe.holdout)}),
        "ranks": trainer.ranks.count,
        "threads": torch.get_num_threads(),
        "vitrail": __version__,
        "torch": str(torch.__version__),
        "seconds": round(trainer.spent, 1),
        "command": writable(command),
        **initial.origin,
    }
    if (package := OBJECTIVES.provider(recipe.objective)) is not None:
        provenance["objective_package"] = package
    if scores is not None:
        provenance["scores"] = scores
    if trainer.damaged:
        files = {writable(path): writable(reason) for path, reason in trainer.damaged.items()}
        provenance["damaged"] = {"policy": recipe.on_damage, "files": files}
    return provenance


def _which_weights(trainer: Trainer, initial: Initial, choice: Choice | None, *, is_best: bool) -> str:
    if choice is not None and choice.kept == "start":
        return LINEAR_HEAD
    if not trainer.total:
        return "as they began" if initial.probe is None else LINEAR_HEAD
    average = trainer.recipe.average
    if trainer.recipe.freeze:
        return f"{LINEAR_HEAD}, trained" + (f" (running average, decay {average})" if average else "")
    which = f"running average, decay {average}" if average else "last"
    if not is_best or trainer.best is None:
        return which
    of = f" ({which})" if average else ""
    return f"best on the held-out images, of step {trainer.best['step']}{of}"
