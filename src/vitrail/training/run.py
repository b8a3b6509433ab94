"""A run, from DATA and a name to a folder with a bundle and a report.

RUN/config.toml      every setting, resolved
RUN/metrics.jsonl    what happened, a line of JSON for each event; TensorBoard's events beside it
RUN/checkpoints/     the last ones and the best
RUN/bundle/          the model, ready to use
RUN/report.html      for people
RUN/.lock            held by the process that writes the run, whose id and machine it names
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from vitrail import __version__, chance
from vitrail.configs import zoo
from vitrail.configs.base import ModelConfig
from vitrail.configs.recipe import OBJECTIVES, Recipe, write_toml
from vitrail.console import printable, say
from vitrail.data.cache import ImageCache
from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import Loader
from vitrail.data.sources import open_data
from vitrail.errors import UsageError, VitrailError
from vitrail.images.decode import identify
from vitrail.images.preprocess import Preprocess
from vitrail.models.base import AnyModel
from vitrail.models.create import build
from vitrail.storage import MANIFEST, check_output, locked, writable, write_text
from vitrail.training.checkpoint import Checkpoint, steps_of, sweep
from vitrail.training.loop import Options, Stop, Trainer, resume
from vitrail.training.ranks import Ranks, join
from vitrail.training.report import write_report
from vitrail.training.runlog import RunLog
from vitrail.weights.bundle import Bundle, save

_LOOKED_AT = 200  # files that tell whether images are grey
_ENOUGH_EPOCHS, _ENOUGH_STEPS = 5, 20  # worth training after a head by least squares, though below `least_steps`


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins: a model with its first weights, and what happens to pixels before it."""

    model: AnyModel
    preprocess: Preprocess
    source: str = ""
    """What tells apart where the weights come from: a run goes on only from the same."""
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the bundle should remember of it."""
    notes: tuple[str, ...] = ()
    """What people should know of it."""
    probe: dict[str, Any] | None = None
    """What its head is worth already, if it was learned in closed form."""
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    """Images that could not be read on the way."""
    body: Callable[[], AnyModel] | None = None
    """Makes the model again as it began, but for its head, where training may turn out not to be worth it."""


class Given(NamedTuple):
    """What a start is made from."""

    dataset: Dataset
    training: Split
    ranks: Ranks
    is_new: bool
    """Whether the start matters: a run that goes on has its weights in a checkpoint."""


def train(
    data: str,
    model: str,
    output: Path,
    recipe: Recipe,
    options: Options,
    *,
    resumes: bool = False,
    force: bool = False,
    command: str = "",
) -> None:
    """`vitrail train`: a model by its name, from its first weights."""
    if recipe.head == "probe":
        raise UsageError("Head must be zero where a model begins with its first weights, got probe. See finetune.")

    def start(given: Given) -> Start:
        config = resolve_model(zoo.find(model), given.dataset, recipe)
        preprocess = make_preprocess(config, given.training, recipe)
        torch.manual_seed(options.seed)
        made = build(config)
        if recipe.head_bias and made.head.bias is not None:
            torch.nn.init.constant_(made.head.bias, recipe.head_bias)
        made.prepare(lambda count: _some_images(given.training, preprocess, count, options.seed), options.seed)
        return Start(made, preprocess)

    run(data, output, recipe, options, start, resumes=resumes, force=force, command=command)


def run(
    data: str,
    output: Path,
    recipe: Recipe,
    options: Options,
    start: Callable[[Given], Start],
    *,
    resumes: bool,
    force: bool,
    command: str,
) -> None:
    """Everything that all runs share, whatever they start from."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join(options.device))
        dataset = open_data(data)
        training, held_out = dataset.for_training(holdout=recipe.holdout, seed=options.seed)
        if options.threads:
            torch.set_num_threads(options.threads)
        ranks.first_does(lambda: _check_claim(output, resumes=resumes, force=force))
        # Once, by the first rank, to the end of the run: at once where there is a folder, else when it is claimed.
        hold = functools.cache(lambda: stack.enter_context(locked(output / _LOCK, functools.partial(_refuse, output))))
        ranks.first_does(lambda: output.is_dir() and hold())
        goes_on = ranks.first_does(lambda: resumes and bool(steps_of(output / "checkpoints")))
        begin = start(Given(dataset, training, ranks, is_new=not goes_on))
        cache = None
        if options.cache:
            cache = stack.enter_context(ImageCache(options.cache, int(options.cache_gigabytes * 1e9)))
        trainer = Trainer(
            begin.model,
            begin.preprocess,
            training,
            held_out,
            recipe,
            options,
            ranks,
            labels=dataset.labels,
            cache=cache,
        )
        trainer.began = began
        trainer.loader.damaged |= begin.damaged
        settings = _config(data, begin, recipe, options, command)
        is_new = ranks.first_does(lambda: _claim(output, settings, is_held=hold(), resumes=resumes, force=force))
        agreed = {
            "bundle": begin.source,
            "seed": options.seed,
            "model": begin.model.config.to_document(),
            "preprocess": begin.preprocess.to_json(),
            "recipe": recipe.to_json(),
            "data": dataset.fingerprint(),
        }
        checkpoint, notes = (None, []) if is_new else resume(trainer, output, agreed)
        changed = []
        if checkpoint is not None:
            begin = dataclasses.replace(begin, origin=checkpoint.state["origin"])
            changed = _changes(checkpoint, options, ranks)
        else:
            if not is_new:  # it was killed before its first checkpoint, and may be another run now
                ranks.first_does(lambda: _write_config(output, settings))
            if begin.probe is not None and trainer.planned != 0:
                trainer.remember_start()
            trainer.total, note = _length(trainer, begin, began)
            notes += [note] if note else []
        state = {**agreed, **_circumstances(options, ranks), "origin": begin.origin}
        log = stack.enter_context(RunLog(output, trainer.total, speaks=ranks.is_first))
        with Stop().watching() as stop:
            for note in (*begin.notes, *notes, *changed):
                log.say(f"note: {note}")
            if checkpoint is not None:
                log.write("resume", step=trainer.step, exact=not changed)
                log.say(f"going on after step {trainer.step} of {trainer.total}")
            else:
                log.write("start", step=0, total=trainer.total, seed=options.seed, threads=torch.get_num_threads())
                if begin.probe is not None:
                    log.write("probe", step=0, **begin.probe)
                if trainer.start is not None and trainer.start["count"]:
                    trainer.write_evaluation(0, trainer.start, log)
                _introduce(log, begin, dataset, training, held_out, trainer)
            trainer.run(output, log, state, stop)
        _finish(output, dataset, trainer, begin, log, data=data, fingerprint=agreed["data"], command=command)


def resolve_model(config: ModelConfig, dataset: Dataset, recipe: Recipe) -> ModelConfig:
    """A named model for this data: channels and classes, and for small presets the resolution, come from DATA."""
    output, pixels = OBJECTIVES[recipe.objective].output, dataset.first.in_memory
    resolved = config.predicting(output).for_data(
        classes=0 if output == "features" else len(dataset.labels),
        channels=channels_of(dataset.first),
        resolution=None if pixels is None else pixels.shape[1:3],
        settings={name: value for name, value in recipe.model.items() if name not in ("classes", "channels")},
    )
    for name, fits in (("classes", resolved.classes), ("channels", resolved.channels)):
        if recipe.model.get(name, fits) != fits:
            raise UsageError(f"{name.capitalize()} must be DATA's {fits}, got model.{name} {recipe.model[name]!r}.")
    return resolved


def make_preprocess(config: ModelConfig, split: Split, recipe: Recipe) -> Preprocess:
    """Small images uncropped; photos with a crop and ImageNet's statistics; then what the recipe says."""
    settings: dict[str, Any] = {"resolution": config.resolution}
    if split.in_memory is not None:
        settings["crop_fraction"] = 1.0
    if split.in_memory is not None or config.channels != 3:
        settings |= {"mean": (0.5,) * config.channels, "std": (0.5,) * config.channels}
    told = dict(recipe.preprocess)
    for name in ("mean", "std"):  # a recipe for colours on other images: one number for all channels
        if (
            isinstance(told.get(name), list | tuple)
            and len(told[name]) != config.channels
            and len(set(told[name])) == 1
        ):
            told[name] = (told[name][0],) * config.channels
    try:
        preprocess = Preprocess.from_json({**settings, **told})
    except UsageError as error:
        raise UsageError(f"{error} (in the recipe's preprocess)") from None
    for name in ("resolution", "channels"):
        if getattr(preprocess, name) != getattr(config, name):
            raise UsageError(
                f"Preprocessing must give the model's {name} {getattr(config, name)}, got {getattr(preprocess, name)}."
            )
    return preprocess


def _some_images(split: Split, preprocess: Preprocess, count: int, seed: int) -> torch.Tensor:
    """At most so many training images, chosen at random, as the model sees them (B, C, H, W)."""
    chosen = chance.permutation(len(split), seed, stream="palette pictures")[:count]
    loader = Loader(split.take(np.sort(chosen)), preprocess, batch=64, shuffle=False, on_damage="substitute")
    return torch.cat([preprocess.scale(batch.pixels) for batch in loader.epoch()])


def channels_of(split: Split) -> int:
    """Channels of images in memory; of files, 1 if the first ones are all grey."""
    if (pixels := split.in_memory) is not None:
        return pixels.shape[3]
    modes = []
    for path in split.images[:_LOOKED_AT]:
        with contextlib.suppress(VitrailError):  # the loader will say more
            modes.append(identify(path)[1])
    return 1 if modes and all(mode in ("1", "L", "I", "F") or mode.startswith("I;16") for mode in modes) else 3


def _length(trainer: Trainer, begin: Start, began: float) -> tuple[int, str | None]:
    """Steps of a run, and a word if it is not worth any."""
    recipe = trainer.recipe
    if trainer.planned is not None:
        return trainer.planned, None
    minutes = recipe.minutes or 0.0
    steps = int(trainer.ranks.from_first(trainer.measure(60 * minutes - (time.monotonic() - began))))
    least = min(recipe.least_steps, max(_ENOUGH_STEPS, _ENOUGH_EPOCHS * trainer.loader.steps))
    if begin.probe is None or steps >= least:
        return steps, None
    return 0, (
        f"{steps} steps would fit into {minutes:g} minutes; below {least}, the head by least squares is kept as it is"
        " (more --minutes, or a lower --resolution, change that)"
    )


class Choice(NamedTuple):
    """What is kept after training that began with a head by least squares, and why."""

    kept: Literal["start", "tuned"]
    reason: str


def _choose(trainer: Trainer, begin: Start, log: RunLog) -> Choice | None:
    """Keep the tuned model, unless the one it began with does better on the held-out images."""
    start = trainer.start
    if start is None or begin.body is None or not trainer.total:
        return None
    tuned = trainer.latest or trainer.examine()  # a run that had ended already evaluates once more
    choice, scores = _compare(trainer, start, tuned), {}
    if tuned is not None and start["count"]:
        scores = {"start": start["score"], "tuned": tuned["score"], "count": start["count"]}
    log.write("choice", step=trainer.step, kept=choice.kept, **scores, reason=choice.reason)
    log.say(f"note: {choice.reason}")
    if choice.kept == "start":
        trainer.return_to_start(begin.body())
    return choice


def _compare(trainer: Trainer, start: dict[str, Any], tuned: dict[str, Any] | None) -> Choice:
    if tuned is None or not start["count"]:
        return Choice("tuned", "the tuned model is kept: no held-out images tell how good the head by least squares is")
    head, model = (f"{trainer.objective.describe(found)}, loss {found['loss']:.3f}" for found in (start, tuned))
    on = f"on {start['count']:,} held-out images"
    if start["score"] > tuned["score"]:
        return Choice("start", f"the head by least squares is kept: {head} {on}; after {trainer.step:,} steps {model}")
    if start["score"] == tuned["score"]:
        return Choice("tuned", f"the tuned model is kept: {model} {on}; the head by least squares was as good")
    return Choice("tuned", f"the tuned model is kept: {model} {on}; the head by least squares had {head}")


def _circumstances(options: Options, ranks: Ranks) -> dict[str, Any]:
    """What the last bits of a run depend on, besides what it was told."""
    return {
        "threads": torch.get_num_threads(),
        "ranks": ranks.count,
        "device": ranks.device.type,
        "amp": options.amp,
        "compile": options.compile,
        "torch": str(torch.__version__),
    }


def _changes(checkpoint: Checkpoint, options: Options, ranks: Ranks) -> list[str]:
    """A resumed run computes with the threads it began with, unless it is told otherwise. What changed, in words."""
    before = checkpoint.state
    if options.threads is None:
        torch.set_num_threads(before["threads"])
    return [
        f"{name} is {value} after {before[name]}: the last bits of the weights will differ"
        for name, value in _circumstances(options, ranks).items()
        if before[name] != value
    ]


def _check_claim(output: Path, *, resumes: bool, force: bool) -> None:
    """Refuse an output that may not be written, before any work is done for it."""
    is_run = _is_run(output)
    is_taken = bool(_content(output)) if output.is_dir() else os.path.lexists(output)
    if is_taken and not (resumes and is_run):
        if force and not is_run:
            raise UsageError(
                f"Output to be overwritten must be a run of vitrail, got {str(output)!r}. Move it away yourself."
            )
        if is_run and not force:
            raise UsageError(
                f"Output must not exist yet, got the run {str(output)!r}. Go on with it by --resume auto, choose"
                " another path, or overwrite it with --force (in Python: resumes=True, force=True)."
            )
        check_output(output, force=force)
    check_output(output, force=True)


def _refuse(output: Path, holder: str) -> None:
    raise UsageError(
        f"Output must be written by one process at a time, got {str(output)!r}, which {holder} is writing. Wait for it,"
        " end it, or choose another path."
    )


def _claim(output: Path, settings: str, *, is_held: bool, resumes: bool, force: bool) -> bool:
    """Make the run's folder with its config.toml. Returns whether the run is new."""
    _check_claim(output, resumes=resumes, force=force)
    if is_held:
        sweep(output / "checkpoints")
    else:
        say(f"note: {str(output)!r} is on a file system without locks: see to it that no other process writes there")
    if resumes and _is_run(output):
        return False
    for path in (*output.glob("events.out.tfevents.*"), *(output / name for name in _LEFT)):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    _write_config(output, settings)
    return True


def _write_config(output: Path, settings: str) -> None:
    """Atomically: by its config.toml, a run is known."""
    aside = output / _WRITING
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_text(aside, settings)
        aside.rename(output / "config.toml")
        (output / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"Output must be a folder that can be written, got {str(output)!r} ({error.strerror})."
        ) from None


def _is_run(output: Path) -> bool:
    """Whether a folder is a run: it has our config.toml, or at least our bundle, or was killed before it had either."""
    try:
        with (output / "config.toml").open(encoding="utf-8") as file:
            return file.read(len(_MARK)) == _MARK
    except (OSError, UnicodeDecodeError):
        is_begun = output.is_dir() and _content(output) == [_WRITING]
        return is_begun or (output / "bundle" / MANIFEST).is_file()


def _content(output: Path) -> list[str]:
    """What is in the folder, besides the lock that never leaves it."""
    return [path.name for path in output.iterdir() if path.name != _LOCK]


_MARK = "# vitrail"
_LOCK = ".lock"
_WRITING = ".config.toml.writing"
_LEFT = ("config.toml", "metrics.jsonl", "checkpoints", "bundle", "report.html")


def _config(data: str, begin: Start, recipe: Recipe, options: Options, command: str) -> str:
    """What the run was told, with every default filled in."""
    # A value that is none has no word in TOML and is left out: it is the default.
    fields = {
        "data": data,
        **options.to_json(),
        **recipe.to_json(),
        "preprocess": begin.preprocess.to_json(),
        "model": begin.model.config.to_document(),
    }
    words = " ".join(command.removeprefix("vitrail ").split()) or "in Python"
    return f"{_MARK} {words}\n# version {__version__}, torch {torch.__version__}\n{write_toml(fields)}"


def _which_weights(trainer: Trainer, begin: Start, choice: Choice | None) -> str:
    if choice is not None and choice.kept == "start":
        return "as they began, with a head by least squares"
    if not trainer.total:
        return "as they began" if begin.probe is None else "as they began, with a head by least squares"
    average = trainer.recipe.average
    return f"running average, decay {average}" if average else "last"


def _introduce(
    log: RunLog, begin: Start, dataset: Dataset, training: Split, held_out: Split | None, trainer: Trainer
) -> None:
    config = begin.model.config
    height, width = config.resolution
    watched = f", {len(held_out):,} held out" if held_out is not None else ""
    epochs = trainer.total / trainer.loader.steps
    log.say(
        f"{config.name or config.family}: {config.parameters:,} parameters, {height} x {width} px,"
        f" {config.channels} channel(s);"
        f" {len(training):,} images of {len(dataset.labels):,} classes{watched};"
        + (
            f" {trainer.total:,} steps of {trainer.recipe.batch} ({epochs:.3g} epochs)"
            if trainer.total
            else " no steps"
        )
    )
    if 0 < trainer.total <= trainer.recipe.warmup:
        log.say(f"note: the warm-up of {trainer.recipe.warmup:g} steps is longer than the run of {trainer.total}")


def _finish(
    output: Path,
    dataset: Dataset,
    trainer: Trainer,
    begin: Start,
    log: RunLog,
    *,
    data: str,
    fingerprint: str,
    command: str,
) -> None:
    """Evaluate what is kept, write the bundle and the report."""
    ranks, recipe = trainer.ranks, trainer.recipe
    choice = _choose(trainer, begin, log)
    model = trainer.kept
    split = dataset.splits.get("test", trainer.watch.split if trainer.watch else None)
    judgement = None
    if split is not None:
        loader = trainer.load_to_evaluate(split)
        judgement = trainer.kept_objective.judge(loader, ranks)
        trainer.collect_damage(log, loader)
    if not ranks.is_first:
        return
    scores = None if judgement is None or split is None else {"split": split.name, **judgement.scores}
    if scores is not None:
        log.write("final", step=trainer.step, **scores)
    seconds = round(trainer.spent, 1)
    provenance = {
        "data": f"{writable(data)}: {len(trainer.loader.split):,} training images",
        "data_fingerprint": fingerprint,
        "licence": dataset.licence,
        "objective": recipe.objective,
        "weights": _which_weights(trainer, begin, choice),
        **({} if choice is None else {"choice": choice.reason}),
        "steps": trainer.step,
        "epochs": round(trainer.step / trainer.loader.steps, 3),
        "seed": trainer.options.seed,
        "ranks": ranks.count,
        "threads": torch.get_num_threads(),
        "vitrail": __version__,
        "torch": str(torch.__version__),
        "seconds": seconds,
        "command": writable(command),
        **begin.origin,
    }
    if (package := OBJECTIVES.provider(recipe.objective)) is not None:
        provenance["objective_package"] = package
    if scores is not None:
        provenance["scores"] = scores
    if trainer.damaged:
        files = {writable(path): writable(reason) for path, reason in trainer.damaged.items()}
        provenance["damaged"] = {"policy": recipe.on_damage, "files": files}
    bundle = Bundle(
        model=model.eval(),
        preprocess=trainer.preprocess,
        labels=dataset.labels if trainer.objective.classifies else None,
        provenance=provenance,
    )
    save(bundle, output / "bundle", force=True)
    shown = split if split is not None else trainer.loader.split
    write_report(output, bundle, trainer.kept_objective, judgement, shown)
    log.write("end", step=trainer.step, seconds=seconds)
    if judgement is not None:
        sys.stdout.write(f"{judgement.sentence}\n")
    for name, path in (("model", output / "bundle"), ("report", output / "report.html")):
        sys.stdout.write(f"{name:6}  {printable(str(path))}\n")
