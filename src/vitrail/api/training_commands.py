"""The commands `train`, `finetune`, `doctor`, `runs` and `demo`."""

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Generator, Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Unpack

from vitrail.api.parameters import (
    BundlePath,
    Corrections,
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
from vitrail.bundles.card import check_licence
from vitrail.bundles.folder import check_folder
from vitrail.core.errors import CorruptImageError, UsageError
from vitrail.core.files import check_output
from vitrail.core.flags import argument, flag
from vitrail.core.settings import sentence_case
from vitrail.core.terminal import in_notebook
from vitrail.data.sources.registry import AnyData, open_data, with_corrections
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
            f"Training objective: {', '.join(OBJECTIVES)}. multilabel needs DATA with several labels per image,"
            " masked needs a ViT, next-pixel an iGPT. margin is for `faces train`. Default: as in the recipe.",
            metavar="NAME",
        ),
    ] = None,
    resolution: Annotated[
        int | tuple[int, int] | None,
        resolution_flag("Input size, 224 or 224x384; default: that of the model, or that of small images."),
    ] = None,
    **options: Unpack[RunKeywords],
) -> "Result":
    """Train a new model.

    Safe to interrupt: --resume auto continues and ends with the same weights. Channels, classes and, for small models,
    the resolution are those of DATA. Use torchrun to train in several processes.

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
            f"Model must be a name that `vitrail models` lists, got {type(model).__name__}. To train an"
            " existing model, use vitrail.finetune(vitrail.Bundle(model=model, preprocess=...), data)."
        )
    zoo.find(model)  # raises an error for an unknown name before the folder is created
    with start.folder() as folder:
        from vitrail.reports.run_report import RunReport
        from vitrail.training.run import train as run

        result = run(
            start.correct(data), model, folder, start.recipe, start.options, observers=(RunReport,), **start.keywords
        )
        return start.finish(result)


@command
def finetune(
    bundle: BundlePath,
    data: Data,
    *,
    resolution: Annotated[
        int | tuple[int, int] | None,
        resolution_flag(
            "Input size, 384 or 224x384; default: as in the recipe or the bundle. Position embeddings are interpolated."
        ),
    ] = None,
    recipe: Annotated[
        str | Path | Recipe,
        flag(
            "auto: fit the head by least squares on the features of the frozen model, then train all layers if time"
            " allows (--minutes, 5 by default). frozen: only fit the head. paper-finetune: as in the ViT paper. Or"
            " another recipe of the package, or a .toml file.",
            metavar="R",
            cli_type=str,
            python="Or a `Recipe`.",
        ),
    ] = "auto",
    **options: Unpack[RunKeywords],
) -> "Result":
    """Fine-tune a bundle on the classes of DATA.

    The head is kept if DATA has the classes of the bundle. Changes to the model are printed. Safe to interrupt:
    --resume auto continues.

        >>> shades = np.stack([np.zeros((20, 28, 28)), np.full((20, 28, 28), 255)]).astype(np.uint8)
        >>> tuned = vitrail.finetune("fashion", (shades.reshape(40, 28, 28), ["dark"] * 20 + ["light"] * 20), steps=1)
        >>> tuned.bundle.labels, tuned.accuracy
        (('dark', 'light'), 1.0)
    """
    full_recipe = find_any_recipe(recipe)
    if str(recipe) in recipe_names():  # their preprocessing is for new models; that of the bundle is used
        full_recipe = full_recipe.replace(preprocess={})
    start = prepare_run(full_recipe, options)
    if isinstance(bundle, str | Path):
        check_folder(bundle)
    size = None if resolution is None else as_pair(resolution)
    with start.folder() as folder:
        from vitrail.reports.run_report import RunReport
        from vitrail.training.finetune import finetune as run

        result = run(
            bundle,
            start.correct(data),
            folder,
            start.recipe,
            start.options,
            resolution=size,
            observers=(RunReport,),
            **start.keywords,
        )
        return start.finish(result)


class RunSetup(NamedTuple):
    """Checked keywords of a run: its recipe, options, corrections and output."""

    recipe: Recipe
    options: Options
    corrections: str | Path | None
    output: str | Path | None
    keywords: dict[str, Any]
    """Further keywords for the functions that train."""

    @contextlib.contextmanager
    def folder(self) -> Generator[Path]:
        """Yield the folder of the run: `output`, or a temporary folder that is removed at the end of the block."""
        if self.output is not None:
            with _advice_on_images():
                yield Path(self.output)
            return
        for name, is_set in (("resume", self.keywords["resumes"]), ("snapshots", self.options.snapshots)):
            if is_set:
                raise UsageError(f"{sentence_case(name)} must be used with an output, the folder of the run, got none.")
        with tempfile.TemporaryDirectory(prefix="vitrail-") as folder, _advice_on_images():
            yield Path(folder) / "run"

    def correct(self, data: AnyData) -> AnyData:
        """Return DATA with the corrections of the run."""
        return with_corrections(data, self.corrections)

    def finish(self, result: "Result") -> "Result":
        """Return the result, without its folder if that was temporary."""
        return dataclasses.replace(result, folder=None) if self.output is None else result


_RECIPE_KEYWORDS = ("batch", "per_class", "patience")  # keywords that set the setting of the same name


def find_any_recipe(recipe: str | Path | Recipe) -> Recipe:
    """Return the recipe for a name or a file; a `Recipe` is returned unchanged."""
    return recipe if isinstance(recipe, Recipe) else find_recipe(str(recipe))


def prepare_run(recipe: Recipe, keywords: RunKeywords, settings: Mapping[str, Any] | None = None) -> RunSetup:
    """Check the keywords of a run, and return them with the recipe that they change.

    `settings` are changes by further flags of the command, by their keys in the recipe; None changes nothing.
    """
    values: dict[str, Any] = dict(keywords)
    options = Options(**{name: values[name] for name in RunOptions.__annotations__ if name in values})
    _check_callback(values.get("callback"))
    changes = {"learning_rate": values.get("lr"), **{name: values.get(name) for name in _RECIPE_KEYWORDS}}
    lengths = {name: values.get(name) for name in ("epochs", "steps", "minutes")}
    changed_recipe = adjust_recipe(recipe, {**changes, **(settings or {})}, values.get("settings", ()), **lengths)
    passed = {
        "resumes": values.get("resume", False),
        "force": values.get("force", False),
        "quiet": _is_quiet(values.get("quiet")),
        "command": values.get("command", ""),
        "callback": values.get("callback"),
        "licence": None if values.get("licence") is None else check_licence(values["licence"]),
    }
    return RunSetup(changed_recipe, options, values.get("corrections"), values.get("output"), passed)


@contextlib.contextmanager
def _advice_on_images() -> Generator[None]:
    """Add advice to the error about an image that cannot be read."""
    try:
        yield
    except CorruptImageError as error:
        advice = "`vitrail doctor` finds all such images; `--set on_damage=skip` trains without them."
        raise CorruptImageError(f"{error} {advice}", path=error.path) from None


def _check_callback(callback: object) -> None:
    """Raise UsageError unless a callback can be called with one argument, so that it does not fail after a step."""
    if callback is None:
        return
    rule = "Callback must be a function of one argument, the Step"
    if not callable(callback):
        raise UsageError(f"{rule}, got {callback!r}.")
    try:
        parameters = signature(callback)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return
    try:
        parameters.bind(None)
    except TypeError:
        raise UsageError(f"{rule}, got {getattr(callback, '__name__', 'a callable')}{parameters}.") from None


def _is_quiet(quiet: bool | None) -> bool:
    """Return `quiet`; by default True unless stderr is a terminal or this is a notebook."""
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
        """Return the problems that would stop training."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def to_json(self) -> dict[str, Any]:
        """Return all problems, as `vitrail doctor --json` prints them."""
        return {"findings": [finding.to_json() for finding in self.findings]}


@command
def doctor(
    data: Data,
    *,
    corrections: Corrections = None,
    people: Annotated[
        str | Path | None,
        file_flag(
            "The classes of DATA are people. FILE has the names of those in the training set, one per line, as for"
            " `faces train`; all others are the test set."
        ),
    ] = None,
) -> Diagnosis:
    """Check a data set for problems that would harm training.

    Problems are unreadable files, duplicates across splits, class imbalance and more. The exit code is 1 if there are
    errors, which would stop training, and 0 if there are only warnings.

        >>> pixels = np.random.default_rng(0).integers(0, 256, (8, 28, 28), np.uint8)
        >>> diagnosis = vitrail.doctor((np.concatenate([pixels, pixels[:1]]), ["a"] * 8 + ["b"]))
        >>> len(diagnosis.errors), sorted({finding.severity for finding in diagnosis.findings})
        (0, ['warning'])
    """
    from vitrail.data.doctor import find_problems

    if people is None:
        dataset = open_data(with_corrections(data, corrections))
    elif isinstance(data, str | Path):
        from vitrail.faces.people import name_splits

        dataset = name_splits(with_corrections(data, corrections), people)
    else:
        raise UsageError(
            f"Data with people must be a folder with one subfolder for each person, got {type(data).__name__}."
        )
    return Diagnosis(dataset, find_problems(dataset, people=people is not None))


@command
def runs(
    folders: Annotated[
        "str | Path | tuple[str | Path, ...] | list[str | Path]",
        argument(
            "Folders written by train or finetune, or folders that contain them.",
            metavar="RUN|DIR",
            cli_type=tuple[str, ...],
        ),
    ],
    *,
    page: Annotated[
        str | Path | None, folder_flag("Also write a page with the training curves over steps and over time.")
    ] = None,
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
    command: RecordedCommand = "",
) -> "RunComparison":
    """Compare training runs by their scores and settings.

    Scores have 95 % intervals. Runs with the same test images are compared by a paired test.

    >>> for lr in (0.001, 0.01):
    ...     result = vitrail.train("digits", "ViT-Pico/2", steps=2, batch=16, lr=lr, output=f"runs/{lr}")
    >>> comparison = vitrail.runs("runs")
    >>> comparison.names, comparison.differences["learning_rate"], len(comparison.pairs)
    (('0.01', '0.001'), [0.01, 0.001], 1)
    """
    folders = tuple(folders) if isinstance(folders, tuple | list) else (folders,)
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise UsageError(f"Runs must be paths, got {folder!r}.")
    if not folders:
        raise UsageError("Runs must be folders written by train or finetune, got none.")
    if page is not None:
        check_output(Path(page), force=force)
    from vitrail.evaluation.compare_runs import compare_runs

    comparison = compare_runs(folders)
    if page is not None:
        from vitrail.reports.runs_page import write_runs_page

        write_runs_page(comparison, Path(page), command=command, force=force)
    return comparison


@command
def demo(
    *,
    output: Annotated[str | Path, folder_flag("Folder to write.", cli_default=Path("demo"))] = "demo",
    epochs: Annotated[int, flag("Number of passes over the training digits.", metavar="N")] = 100,
    seed: Annotated[int, flag("Random seed. The same seed and machine give the same weights.", metavar="S")] = 0,
    resume: Resume = False,
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
    lab: Annotated[bool, flag("Also run the bias lab for a minute (needs the extra `lab`).")] = True,
) -> "Result":
    """Train a small ViT on embedded digits and plot its attention.

    It is trained on 1,437 digits and tested on 360 others. Then the embedded bundle classifies 40 images of clothes.
    """
    from vitrail.api.demo import run

    return run(Path(output), epochs=epochs, seed=seed, resumes=resume, force=force, lab=lab)
