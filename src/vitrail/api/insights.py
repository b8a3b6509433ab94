"""Looking inside of models, and comparing architectures: inspect, explain, compare."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitrail.api.flags import BundlePath, DataOnDisk, Device, RecordedCommand, command, folder_flag
from vitrail.api.results import Report
from vitrail.bundles.folder import check_folder, read_config
from vitrail.core.errors import UsageError
from vitrail.core.files import check_output
from vitrail.core.flags import REQUIRED, argument, flag
from vitrail.core.settings import as_integer
from vitrail.core.terminal import say
from vitrail.data.image_files import name_images
from vitrail.lab.registry import FAMILIES as COMPARED
from vitrail.lab.registry import QUESTIONS

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.data.preprocess import ImageLike
    from vitrail.data.sources.registry import AnyData
    from vitrail.reports.inspect.inspection_page import Inspection

_MORE = 64  # images of `data` that an inspection takes


@command
def inspect(
    bundle: Annotated[
        "str | Path | Bundle",
        argument(
            "A folder written by train, finetune or convert, or the embedded bundle fashion; a run, whose"
            " snapshots (train --snapshots N) show what grows over training; or the name of a model, untrained.",
            metavar="BUNDLE",
            cli_type=str,
            python="Or a `vitrail.Bundle`.",
        ),
    ],
    images: Annotated[
        "ImageLike | Iterable[ImageLike]",
        argument(
            "Images to inspect, folders of them, or - for names from stdin, one a line.",
            metavar="IMAGE",
            cli_type=tuple[str, ...],
            python="Or pixels, uint8 (n, height, width[, channels]); up to 32 images.",
        ),
    ],
    *,
    output: Annotated[
        str | Path | None,
        folder_flag(
            "Folder to write: index.html, figures, inspect.json.",
            cli_default=REQUIRED,
            python="None: nothing is written.",
        ),
    ] = None,
    evidence: Annotated[
        bool, flag("Also remove parts of the image and run the model again: hundreds of forward passes.")
    ] = False,
    data: Annotated[
        "AnyData | None",
        flag(
            "More images (up to 64) for results that need many; any folder of images will do.",
            metavar="DATA",
            cli_type=str,
        ),
    ] = None,
    against: Annotated[
        "str | Path | Bundle | None", flag("Another bundle to compare layers with.", metavar="BUNDLE", cli_type=str)
    ] = None,
    patch: Annotated[
        tuple[int, int] | None,
        flag("The patch to follow through the model, from 0; by default the centre.", metavar="ROW COLUMN"),
    ] = None,
    inside: Annotated[
        Sequence[int] | None,
        flag(
            "Show these layers step by step, from 0 or from the end (-1); by default three.",
            metavar="L",
            cli_type=tuple[int, ...],
            cli_default=(),
        ),
    ] = None,
    layers: Annotated[
        Sequence[int] | None,
        flag(
            "Show only the attention of these layers, from 0 or from the end (-1).",
            metavar="L",
            cli_type=tuple[int, ...],
            cli_default=(),
        ),
    ] = None,
    heads: Annotated[
        Sequence[int] | None,
        flag("Show only the attention of these heads, from 0.", metavar="H", cli_type=tuple[int, ...], cli_default=()),
    ] = None,
    full: Annotated[
        bool,
        flag("Keep the attention of every head and patch, however large the page becomes, and write arrays.npz."),
    ] = False,
    device: Device = None,
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
) -> "Inspection":
    """Show what happens inside a model, on one page: every step, attention, position embeddings, and more.

    >>> seen = vitrail.inspect("fashion", np.zeros((1, 28, 28), np.uint8), patch=(2, 3))
    >>> seen.numbers["followed"], len(seen.numbers["pictures"][0]["inside"][0]["heads"])
    ({'row': 2, 'column': 3}, 3)
    """
    if output is not None:
        check_output(Path(output), force=force)
    shown, names = name_images(images)
    if patch is not None:
        match [as_integer(side) for side in patch] if isinstance(patch, Iterable) else []:
            case int() as row, int() as column:
                patch = row, column
            case _:
                raise UsageError(f"Patch must be a row and a column, got {patch!r}.")
    from vitrail.analysis.inspected_model import open_inspected_model
    from vitrail.data.sources.registry import sample_images
    from vitrail.reports.inspect.inspection_page import Inspection
    from vitrail.reports.inspect.panel_results import compute_panels

    subject = open_inspected_model(bundle, device=device)
    other = None if against is None else open_inspected_model(against, device=device)
    examination = compute_panels(
        subject.bundle,
        shown,
        name=subject.name,
        names=names,
        evidence=evidence,
        other_images=() if data is None else sample_images(data, _MORE),
        against=None if other is None else (other.name, other.bundle),
        layers=layers,
        heads=heads,
        patch=patch,
        inside=inside,
        snapshots=subject.snapshots,
    )
    inspection = Inspection(examination, full=full, notes=[*subject.notes, *examination.notes])
    return inspection if output is None else inspection.save(output, force=force)


@command
def explain(
    bundle: BundlePath,
    images: Annotated[
        "ImageLike | Iterable[ImageLike]",
        argument(
            "Up to 40 images, folders of them, or - for names from stdin; else embedded ones, if they fit BUNDLE.",
            metavar="[IMAGE]",
            cli_type=tuple[str, ...],
        ),
    ] = (),
    *,
    output: Annotated[str | Path, folder_flag("Folder to write: index.html, with the weights inside.")],
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
) -> Path:
    """Write a page that runs a small ViT in the browser and walks through every step of it: draw, mask, shuffle, switch
    parts off, and see the answer change. Returns the page.

        >>> vitrail.explain("fashion", output="explained").name
        'index.html'
    """
    check_output(Path(output), force=force)
    if isinstance(bundle, str | Path):
        read_config(check_folder(bundle)).check_in_page()
    is_empty = isinstance(images, list | tuple) and not images
    shown = [] if is_empty else name_images(images)[0]

    from vitrail.bundles.bundle import open_bundle
    from vitrail.reports.explain.explain_page import explain as write

    return write(open_bundle(bundle), shown, Path(output), force=force)


@command
def compare(
    data: DataOnDisk,
    *,
    output: Annotated[str | Path, folder_flag("Output folder. An existing lab is resumed.")],
    questions: Annotated[
        Sequence[str],
        flag(f"What to ask: {', '.join(QUESTIONS)}; else all of it.", metavar="NAME", cli_type=tuple[str, ...]),
    ] = (),
    families: Annotated[
        Sequence[str], flag(f"Which to compare; else {', '.join(COMPARED)}.", metavar="NAME", cli_type=tuple[str, ...])
    ] = (),
    sizes: Annotated[
        Sequence[int], flag("Numbers of training images; else chosen from DATA.", metavar="N", cli_type=tuple[int, ...])
    ] = (),
    seeds: Annotated[int, flag("How often everything is trained, one less above 10,000 images.", metavar="N")] = 3,
    budget: Annotated[
        str | None, flag("20m, 90s, 2h: what does not fit is dropped, and named.", metavar="TIME")
    ] = None,
    jobs: Annotated[int | None, flag("Processes side by side; else as many as cores.", metavar="N")] = None,
    backend: Annotated[
        str, flag("loky (this machine), dask, or another that is registered with joblib.", metavar="B")
    ] = "loky",
    bundles: Annotated[
        Sequence[str | Path],
        flag(
            "Instead of training, measure the biases of these on DATA: shifts, order, reach.",
            metavar="BUNDLE",
            cli_type=tuple[str, ...],
        ),
    ] = (),
    command: RecordedCommand = "",
) -> Report:
    """The bias lab: measure what each architecture assumes of images, on yours, and judge the claims about it.

    Safe to interrupt: run the same command again to resume. More questions, sizes or seeds extend the lab.

        >>> found = vitrail.compare("digits", output="lab", bundles=["fashion"])
        >>> found["images"], found["bundles"][0]["name"]
        (360, 'fashion')
    """
    if bundles:
        if questions or families or sizes:
            raise UsageError("--bundles must come without --questions, --families and --sizes: nothing is trained.")
        return _profile(data, Path(output), [str(bundle) for bundle in bundles], budget=budget, command=command)

    from vitrail.lab.compare import compare as run

    return Report(
        run(
            data,
            Path(output),
            questions=questions,
            families=families,
            sizes=sizes,
            seeds=seeds,
            budget=budget,
            jobs=jobs,
            backend=backend,
            command=command,
            tell=say,
        )
    )


def _profile(data: Any, output: Path, bundles: list[str], *, budget: str | None, command: str) -> Report:
    for bundle in bundles:
        check_folder(bundle)
    from vitrail.lab.profile import profile
    from vitrail.lab.profile_page import check_profile_output, write_profile

    check_profile_output(output)
    found, pairs, split = profile(data, bundles, budget=budget, tell=say)
    return Report(write_profile(output, found, pairs, data=data, split=split, command=command))
