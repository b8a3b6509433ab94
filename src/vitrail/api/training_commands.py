"""Training, fine-tuning, comparing runs and checking data."""

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Generator, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Unpack

from vitrail.api.flags import (
    BundlePath,
    Data,
    RecordedCommand,
    Resume,
    RunKeywords,
    as_pair,
    command,
    file_flag,
    folder_flag,
    resolution_flag,
)
from vitrail.bundles.folder import check_folder
from vitrail.core.errors import CorruptImageError, UsageError
from vitrail.core.files import check_output
from vitrail.core.flags import argument, flag
from vitrail.core.settings import sentence_case
from vitrail.core.terminal import in_notebook
from vitrail.data.sources.registry import open_data
from vitrail.models import zoo
from vitrail.training.options import Options, RunOptions
from vitrail.training.recipe import OBJECTIVES, Recipe, adjust_recipe, find_recipe, recipe_names

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset
    from vitrail.data.doctor import Finding
    from vitrail.evaluation.compare_runs import RunComparison
    from vitrail.training.run import Result


@command
def train(
    data: Data,
    model: Annotated[str, flag("A name of `vitrail models`.", metavar="NAME")],
    *,
    recipe: Annotated[
        str | Path | Recipe,
        flag("A recipe of the package, or a .toml file.", metavar="R", cli_type=str, python="Or a `Recipe`."),
    ] = "small",
    objective: Annotated[
        str | None,
        flag(
            f"Training objective: {', '.join(OBJECTIVES)}. multilabel needs DATA with several labels an image,"
            " masked a ViT, next-pixel an iGPT; margin is for `faces train`.",
            metavar="NAME",
        ),
    ] = None,
    resolution: Annotated[
        int | tuple[int, int] | None,
        resolution_flag("Input size, 224 or 224x384; default: the model's own, or that of small images."),
    ] = None,
    **options: Unpack[RunKeywords],
) -> "Result":
    """Train a model. It may be killed at any time: --resume auto continues and ends with the same weights.

    Channels, classes and, for small presets, the resolution come from DATA. Use torchrun for several processes.

        >>> result = vitrail.train("digits", "ViT-Pico/2", steps=2, batch=16)
        >>> result.steps, result.scores["count"], result.bundle.labels[:3]
        (2, 360, ('0', '1', '2'))
    """
    sides = None
    if resolution is not None:
        height, width = as_pair(resolution)
        sides = height if height == width else [height, width]
    start = prepare_run(find_any_recipe(recipe), options, {"objective": objective, "model.resolution": sides})
    if not isinstance(model, str):
        raise UsageError(
            f"Model must be a name that `vitrail models` lists, got {type(model).__name__}. A model that exists is"
            " trained by vitrail.finetune(vitrail.Bundle(model=model, preprocess=...), data)."
        )
    zoo.find(model)  # refuse an unknown name before the folder is made
    with start.folder() as folder:
        from vitrail.reports.run_report import RunReport
        from vitrail.training.run import train as run

        result = run(data, model, folder, start.recipe, start.options, observers=(RunReport,), **start.keywords)
        return start.finish(result)


@command
def finetune(
    bundle: BundlePath,
    data: Data,
    *,
    resolution: Annotated[
        int | tuple[int, int] | None,
        resolution_flag(
            "Input size, 384 or 224x384; default: as the recipe or the bundle. Positions are interpolated."
        ),
    ] = None,
    recipe: Annotated[
        str | Path | Recipe,
        flag(
            "auto: fit the head by least squares on the frozen model's features, then train all layers if the time"
            " allows (--minutes, 5). frozen: only that head. paper-finetune: as in the paper. Or another recipe, or a"
            " .toml file.",
            metavar="R",
            cli_type=str,
            python="Or a `Recipe`.",
        ),
    ] = "auto",
    **options: Unpack[RunKeywords],
) -> "Result":
    """Fine-tune a bundle on the classes of DATA, at its resolution or another one.

    The head is kept if the classes are those of the bundle. Changes to the model are printed. It may be killed at any
    time: --resume auto continues.

        >>> shades = np.stack([np.zeros((20, 28, 28)), np.full((20, 28, 28), 255)]).astype(np.uint8)
        >>> tuned = vitrail.finetune("fashion", (shades.reshape(40, 28, 28), ["dark"] * 20 + ["light"] * 20), steps=1)
        >>> tuned.bundle.labels, tuned.accuracy
        (('dark', 'light'), 1.0)
    """
    chosen = find_any_recipe(recipe)
    if str(recipe) in recipe_names():  # their preprocessing is for new models; here it is the bundle's
        chosen = chosen.replace(preprocess={})
    start = prepare_run(chosen, options)
    if isinstance(bundle, str | Path):
        check_folder(bundle)
    size = None if resolution is None else as_pair(resolution)
    with start.folder() as folder:
        from vitrail.reports.run_report import RunReport
        from vitrail.training.finetune import finetune as run

        observers = (RunReport,)
        result = run(
            bundle, data, folder, start.recipe, start.options, resolution=size, observers=observers, **start.keywords
        )
        return start.finish(result)


class Start(NamedTuple):
    """What a run begins with, besides its data and model."""

    recipe: Recipe
    options: Options
    output: str | Path | None
    keywords: dict[str, Any]
    """Further keywords of the functions that train."""

    @contextlib.contextmanager
    def folder(self) -> Generator[Path]:
        """The folder of the run: the given one, or a temporary one that is removed in the end."""
        if self.output is not None:
            with _advice_on_images():
                yield Path(self.output)
            return
        for name, is_given in (("resume", self.keywords["resumes"]), ("snapshots", self.options.snapshots)):
            if is_given:
                raise UsageError(f"{sentence_case(name)} must come with an output, the folder of the run, got none.")
        with tempfile.TemporaryDirectory(prefix="vitrail-") as folder, _advice_on_images():
            yield Path(folder) / "run"

    def finish(self, result: "Result") -> "Result":
        """The result, without a folder that is removed."""
        return dataclasses.replace(result, folder=None) if self.output is None else result


_RECIPE_KEYWORDS = ("batch", "per_class", "patience")  # named like the settings that they change


def find_any_recipe(recipe: str | Path | Recipe) -> Recipe:
    """The recipe of a name or a file, or itself."""
    return recipe if isinstance(recipe, Recipe) else find_recipe(str(recipe))


def prepare_run(recipe: Recipe, keywords: RunKeywords, settings: Mapping[str, Any] | None = None) -> Start:
    """Check the keywords of a run, and change its recipe by them. `settings` are those of the command's own flags, by
    their keys in the recipe; None leaves a setting as it is."""
    given: dict[str, Any] = dict(keywords)
    options = Options(**{name: given[name] for name in RunOptions.__annotations__ if name in given})
    _check_callback(given.get("callback"))
    changes = {"learning_rate": given.get("lr"), **{name: given.get(name) for name in _RECIPE_KEYWORDS}}
    lengths = {name: given.get(name) for name in ("epochs", "steps", "minutes")}
    changed = adjust_recipe(recipe, {**changes, **(settings or {})}, given.get("settings", ()), **lengths)
    passed = {
        "resumes": given.get("resume", False),
        "force": given.get("force", False),
        "quiet": _is_quiet(given.get("quiet")),
        "command": given.get("command", ""),
        "callback": given.get("callback"),
    }
    return Start(changed, options, given.get("output"), passed)


@contextlib.contextmanager
def _advice_on_images() -> Generator[None]:
    """Say what to do about an image that cannot be read."""
    try:
        yield
    except CorruptImageError as error:
        advice = "`vitrail doctor` finds all such images; `--set on_damage=skip` trains without them."
        raise CorruptImageError(f"{error} {advice}", path=error.path) from None


def _check_callback(callback: object) -> None:
    """Before the first step, not after it."""
    if callback is None:
        return
    rule = "Callback must be a function of one argument, the Step"
    if not callable(callback):
        raise UsageError(f"{rule}, got {callback!r}.")
    try:
        parameters = signature(callback)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return
    try:
        parameters.bind(None)
    except TypeError:
        raise UsageError(f"{rule}, got {getattr(callback, '__name__', 'one')}{parameters}.") from None


def _is_quiet(quiet: bool | None) -> bool:
    """As told; otherwise quiet unless somebody can watch: in a terminal or a notebook."""
    if quiet is not None:
        return quiet
    return not (in_notebook() or (sys.stderr is not None and sys.stderr.isatty()))


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The problems of a data set."""

    dataset: "Dataset" = dataclasses.field(repr=False)
    findings: list["Finding"]

    @property
    def errors(self) -> list["Finding"]:
        """The problems that would stop training."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def to_json(self) -> dict[str, Any]:
        """All problems."""
        return {"findings": [finding.to_json() for finding in self.findings]}


@command
def doctor(
    data: Data,
    *,
    people: Annotated[
        str | Path | None,
        file_flag(
            "Classes are people: who is trained on, a name a line, as for `faces train`; all others are the test."
        ),
    ] = None,
) -> Diagnosis:
    """Check a data set: unreadable files, duplicates across splits, class imbalance, and more.

    Exit code 1 if there are errors, which would stop training; 0 if there are only warnings or none.

        >>> pixels = np.random.default_rng(0).integers(0, 256, (8, 28, 28), np.uint8)
        >>> found = vitrail.doctor((np.concatenate([pixels, pixels[:1]]), ["a"] * 8 + ["b"]))
        >>> len(found.errors), sorted({finding.severity for finding in found.findings})
        (0, ['warning'])
    """
    from vitrail.data.doctor import find_problems

    if people is None:
        dataset = open_data(data)
    elif isinstance(data, str | Path):
        from vitrail.faces.people import name_splits

        dataset = name_splits(data, people)
    else:
        raise UsageError(f"Data with people must be a folder with one for each, got {type(data).__name__}.")
    return Diagnosis(dataset, find_problems(dataset, people=people is not None))


@command
def runs(
    folders: Annotated[
        "str | Path | tuple[str | Path, ...] | list[str | Path]",
        argument(
            "Folders that train or finetune wrote, or folders of such.", metavar="RUN|DIR", cli_type=tuple[str, ...]
        ),
    ],
    *,
    page: Annotated[
        str | Path | None, folder_flag("Also write a page with the curves over steps and over seconds.")
    ] = None,
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
    command: RecordedCommand = "",
) -> "RunComparison":
    """Compare runs: scores with intervals, settings that differ, and a paired test on the same test images.

    >>> for lr in (0.001, 0.01):
    ...     result = vitrail.train("digits", "ViT-Pico/2", steps=2, batch=16, lr=lr, output=f"runs/{lr}")
    >>> found = vitrail.runs("runs")
    >>> found.names, found.differences["learning_rate"], len(found.pairs)
    (('0.01', '0.001'), [0.01, 0.001], 1)
    """
    folders = tuple(folders) if isinstance(folders, tuple | list) else (folders,)
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise UsageError(f"Runs must be paths, got {folder!r}.")
    if not folders:
        raise UsageError("Runs must be given: folders that train or finetune wrote, got none.")
    if page is not None:
        check_output(Path(page), force=force)
    from vitrail.evaluation.compare_runs import compare_runs

    found = compare_runs(folders)
    if page is not None:
        from vitrail.reports.runs_page import write_runs_page

        write_runs_page(found, Path(page), command=command, force=force)
    return found


@command
def demo(
    *,
    output: Annotated[str | Path, folder_flag("Folder to write.", cli_default=Path("demo"))] = "demo",
    epochs: Annotated[int, flag("Number of passes over the training digits.", metavar="N")] = 100,
    seed: Annotated[int, flag("The same seed and machine give the same model.", metavar="S")] = 0,
    resume: Resume = False,
    force: Annotated[bool, flag("Overwrite the output if it is a run of vitrail.")] = False,
    lab: Annotated[bool, flag("End with a minute of the bias lab (extra `lab`).")] = True,
) -> "Result":
    """Train a small Vision Transformer on 1,437 embedded digits, test it on 360 others, and plot its attention."""
    from vitrail.api.demo import run

    return run(Path(output), epochs=epochs, seed=seed, resumes=resume, force=force, lab=lab)
