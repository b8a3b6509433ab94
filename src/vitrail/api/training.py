"""Commands about runs: checking data, training, fine-tuning, comparing runs, and the demo."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.api import tasks
from vitrail.api.flags import (
    AS_USUAL,
    BundlePath,
    Data,
    Flags,
    Json,
    Resume,
    arg,
    given_command,
    parse_resolution,
)
from vitrail.core.errors import DamagedError, DamagedImageError, UsageError
from vitrail.core.terminal import (
    print_json,
    print_run,
    print_runs,
    print_table,
    printable,
    say,
)
from vitrail.data.sources.registry import open_data
from vitrail.training.recipe import OBJECTIVES

if TYPE_CHECKING:
    from vitrail.training.run import Result


def doctor(
    data: Data,
    *,
    people: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="Classes are people: who is trained on, a name a line, as for `faces train`; all others are the test.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a data set: unreadable files, duplicates across splits, class imbalance, and more.

    Exit code 1 if there are errors, which would stop training; 0 if there are only warnings or none.
    """
    from vitrail.data.doctor import examine, summarise

    if people is None:
        dataset = open_data(data)
    else:
        from vitrail.faces.people import name_splits

        dataset = name_splits(data, people)
    for note in dataset.notes:
        say(f"note: {note}")
    findings = examine(dataset, people=people is not None)
    if json:
        print_json({"findings": [finding.to_json() for finding in findings]})
    else:
        counts = ", ".join(f"{len(split):,} {name}" for name, split in dataset.splits.items())
        print_table(None, [["data", data], ["images", counts], ["classes", f"{len(dataset.labels):,}"]])
        for lines in summarise(findings, dataset.root):
            sys.stdout.write("\n" + "\n    ".join(printable(line) for line in lines) + "\n")
        if not findings:
            sys.stdout.write("\nno problems found\n")
    if any(finding.severity == "error" for finding in findings):
        sys.exit(1)


def train(
    data: Data,
    *,
    model: Annotated[str, arg(metavar="NAME", help="A name of `vitrail models`.")],
    output: Annotated[Path, arg(metavar="RUN", help="Folder to write: config, metrics, checkpoints, bundle, report.")],
    recipe: Annotated[str, arg(metavar="R", help="A recipe of the package, or a .toml file.")] = "small",
    objective: Annotated[
        str | None,
        arg(
            metavar="NAME",
            help=f"Training objective: {', '.join(OBJECTIVES)}. multilabel needs DATA with several labels an image,"
            " masked a ViT, next-pixel an iGPT; margin is for `faces train`.",
        ),
    ] = None,
    resolution: Annotated[
        str | None,
        arg(metavar="R", help="Input size, 224 or 224x384; default: the model's own, or that of small images."),
    ] = None,
    running: Flags = AS_USUAL,
) -> None:
    """Train a model. It may be killed at any time: --resume auto continues and ends with the same weights.

    Channels, classes and, for small presets, the resolution come from DATA. Use torchrun for several processes.
    """
    size = None if resolution is None else parse_resolution(resolution)
    words = running.keywords
    _print_result(
        lambda: tasks.train(data, model, output=output, recipe=recipe, objective=objective, resolution=size, **words)
    )


def finetune(
    bundle: BundlePath,
    data: Data,
    *,
    output: Annotated[Path, arg(metavar="RUN", help="Folder to write: config, metrics, checkpoints, bundle, report.")],
    resolution: Annotated[
        str | None,
        arg(
            metavar="R",
            help="Input size, 384 or 224x384; default: as the recipe or the bundle. Positions are interpolated.",
        ),
    ] = None,
    recipe: Annotated[
        str,
        arg(
            metavar="R",
            help="auto: fit the head by least squares on the frozen model's features, then train all layers if the time"
            " allows (--minutes, 5). frozen: only that head. paper-finetune: as in the paper. Or another recipe, or a"
            " .toml file.",
        ),
    ] = "auto",
    running: Flags = AS_USUAL,
) -> None:
    """Fine-tune a bundle on the classes of DATA, at its resolution or another one.

    The head is kept if the classes are those of the bundle. Changes to the model are printed. It may be killed at any
    time: --resume auto continues.
    """
    size = None if resolution is None else parse_resolution(resolution)
    words = running.keywords
    _print_result(lambda: tasks.finetune(bundle, data, output=output, recipe=recipe, resolution=size, **words))


def _print_result(run: Callable[[], "Result"]) -> None:
    try:
        result = run()
    except DamagedImageError as error:
        advice = "`vitrail doctor` finds all such images; `--set on_damage=skip` trains without them."
        raise DamagedError(f"{error} {advice}", path=error.path) from None
    if result.is_first and result.folder is not None:
        print_run(result.sentence, result.folder)


def runs(
    folders: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(metavar="RUN|DIR", help="Folders that train or finetune wrote, or folders of such."),
    ],
    *,
    page: Annotated[
        Path | None, arg(metavar="DIR", help="Also write a page with the curves over steps and over seconds.")
    ] = None,
    force: Annotated[bool, arg(help="Overwrite DIR if vitrail wrote it.")] = False,
    json: Json = False,
) -> None:
    """Compare runs: scores with intervals, settings that differ, and a paired test on the same test images."""
    if not folders:
        raise UsageError("Runs must be given: folders that train or finetune wrote, got none.")
    if page is not None:
        from vitrail.core.files import check_output

        check_output(page, force=force)
    from vitrail.evaluation.compare_runs import side_by_side

    found = side_by_side(folders)
    if page is not None:
        from vitrail.reports.runs_page import write_page

        write_page(found, page, command=given_command(), force=force)
    for note in found.notes:
        say(f"note: {note}")
    if json:
        return print_json(found.to_json())
    print_runs(found.to_json())
    return print_table(None, [["page", str(page / "index.html")]]) if page is not None else None


def demo(
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write.")] = Path("demo"),
    epochs: Annotated[int, arg(metavar="N", help="Number of passes over the training digits.")] = 100,
    seed: Annotated[int, arg(metavar="S", help="The same seed and machine give the same model.")] = 0,
    resume: Resume = None,
    force: Annotated[bool, arg(help="Overwrite the output if it is a run of vitrail.")] = False,
    lab: Annotated[bool, arg(help="End with a minute of the bias lab (extra `lab`).")] = True,
    open: Annotated[bool, arg(help="Open the report in a browser.")] = False,
) -> None:
    """Train a small Vision Transformer on 1,437 embedded digits, test it on 360 others, and plot its attention."""
    from vitrail.api.demo import run

    run(output, epochs=epochs, seed=seed, resumes=resume == "auto", force=force, opens=open, lab=lab)
