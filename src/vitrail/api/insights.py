"""The commands `inspect`, `explain` and `compare`, which show how models work and what architectures assume."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitrail.api.parameters import BundlePath, DataOnDisk, Device, RecordedCommand, command, folder_flag
from vitrail.api.results import Report
from vitrail.bundles.folder import check_folder, read_config
from vitrail.core.errors import UsageError
from vitrail.core.files import check_output
from vitrail.core.flags import REQUIRED, SPEED, argument, flag
from vitrail.core.settings import as_integer
from vitrail.core.terminal import say
from vitrail.data.image_files import name_images
from vitrail.lab.registry import FAMILIES as COMPARED_FAMILIES
from vitrail.lab.registry import QUESTIONS

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.data.preprocess import ImageLike
    from vitrail.data.sources.registry import AnyData
    from vitrail.reports.inspect.inspection_page import Inspection

_MAX_DATA_IMAGES = 64  # images of --data that `inspect` uses


_SELECTION = "layers and heads on the page"


@command
def inspect(
    bundle: Annotated[
        "str | Path | Bundle",
        argument(
            "A folder written by train, finetune or convert, or `fashion`, the embedded bundle. Or a run whose"
            " snapshots (train --snapshots N) show how the model changes. Or the name of an untrained model.",
            metavar="BUNDLE",
            cli_type=str,
            python="Or a `vitrail.Bundle`.",
        ),
    ],
    images: Annotated[
        "ImageLike | Iterable[ImageLike]",
        argument(
            "Images, folders of images, or - to read paths from stdin, one per line.",
            metavar="IMAGE",
            cli_type=tuple[str, ...],
            python="Or pixels, uint8 (n, height, width[, channels]); up to 32 images.",
        ),
    ],
    *,
    output: Annotated[
        str | Path | None,
        folder_flag(
            "Folder to write: index.html, figures and inspect.json.",
            cli_default=REQUIRED,
            python="None: nothing is written.",
        ),
    ] = None,
    evidence: Annotated[
        bool, flag("Also measure the effect of hiding parts of the image, in hundreds of forward passes.")
    ] = False,
    data: Annotated[
        "AnyData | None",
        flag(
            "More images (up to 64 are used) for results that need many; labels are not used.",
            metavar="DATA",
            cli_type=str,
        ),
    ] = None,
    against: Annotated[
        "str | Path | Bundle | None", flag("Another bundle to compare layers with.", metavar="BUNDLE", cli_type=str)
    ] = None,
    patch: Annotated[
        tuple[int, int] | None,
        flag("Patch to follow through the model, counted from 0; default: the centre.", metavar="ROW COLUMN"),
    ] = None,
    inside: Annotated[
        Sequence[int] | None,
        flag(
            "Layers to show step by step, counted from 0 or from the end (-1); default: three layers.",
            metavar="L",
            group=_SELECTION,
            cli_type=tuple[int, ...],
            cli_default=(),
        ),
    ] = None,
    layers: Annotated[
        Sequence[int] | None,
        flag(
            "Show the attention of these layers only, counted from 0 or from the end (-1).",
            metavar="L",
            group=_SELECTION,
            cli_type=tuple[int, ...],
            cli_default=(),
        ),
    ] = None,
    heads: Annotated[
        Sequence[int] | None,
        flag(
            "Show the attention of these heads only, counted from 0.",
            metavar="H",
            group=_SELECTION,
            cli_type=tuple[int, ...],
            cli_default=(),
        ),
    ] = None,
    full: Annotated[
        bool,
        flag(
            "Show the attention of every head and patch, which can make the page large, and write arrays.npz.",
            group=_SELECTION,
        ),
    ] = False,
    device: Device = None,
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
) -> "Inspection":
    """Write a page that shows what happens inside a model.

    It shows every step of the computation, attention, position embeddings and more.

    >>> inspection = vitrail.inspect("fashion", np.zeros((1, 28, 28), np.uint8), patch=(2, 3))
    >>> inspection.numbers["followed"], len(inspection.numbers["pictures"][0]["inside"][0]["heads"])
    ({'row': 2, 'column': 3}, 3)
    """
    if output is not None:
        check_output(Path(output), force=force)
    pixels, names = name_images(images)
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
    other_subject = None if against is None else open_inspected_model(against, device=device)
    examination = compute_panels(
        subject.bundle,
        pixels,
        name=subject.name,
        names=names,
        evidence=evidence,
        other_images=() if data is None else sample_images(data, _MAX_DATA_IMAGES),
        against=None if other_subject is None else (other_subject.name, other_subject.bundle),
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
            "Up to 40 images, folders of images, or - to read paths from stdin; default: embedded images, if they fit"
            " BUNDLE.",
            metavar="[IMAGE]",
            cli_type=tuple[str, ...],
        ),
    ] = (),
    *,
    output: Annotated[str | Path, folder_flag("Folder to write: index.html, which contains the weights.")],
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
) -> Path:
    """Write a page that runs a small ViT in the browser, step by step.

    On the page you can draw, mask and shuffle patches, switch parts of the model off, and see the prediction change.
    Returns the path of the page.

        >>> vitrail.explain("fashion", output="explained").name
        'index.html'
    """
    check_output(Path(output), force=force)
    if isinstance(bundle, str | Path):
        read_config(check_folder(bundle)).check_in_page()
    is_empty = isinstance(images, list | tuple) and not images
    pixels = [] if is_empty else name_images(images)[0]

    from vitrail.bundles.bundle import open_bundle
    from vitrail.reports.explain.explain_page import explain as write

    return write(open_bundle(bundle), pixels, Path(output), force=force)


@command
def compare(
    data: DataOnDisk,
    *,
    output: Annotated[str | Path, folder_flag("Output folder. An existing lab is resumed.")],
    questions: Annotated[
        Sequence[str],
        flag(f"Questions: {', '.join(QUESTIONS)}; default: all.", metavar="NAME", cli_type=tuple[str, ...]),
    ] = (),
    families: Annotated[
        Sequence[str],
        flag(
            f"Families to compare; default: {', '.join(COMPARED_FAMILIES)}.", metavar="NAME", cli_type=tuple[str, ...]
        ),
    ] = (),
    sizes: Annotated[
        Sequence[int],
        flag(
            "Sizes of the training sets to compare, in images of all classes together; default: chosen from DATA.",
            metavar="N",
            cli_type=tuple[int, ...],
        ),
    ] = (),
    seeds: Annotated[int, flag("Number of trainings with different seeds.", metavar="N")] = 5,
    budget: Annotated[
        str | None, flag("Time limit: 20m, 90s, 2h. Trials that do not fit are dropped and listed.", metavar="TIME")
    ] = None,
    jobs: Annotated[
        int | None, flag("Number of parallel processes; default: all cores.", metavar="N", group=SPEED)
    ] = None,
    backend: Annotated[
        str, flag("Backend of joblib: loky (this machine), dask or another.", metavar="B", group=SPEED)
    ] = "loky",
    bundles: Annotated[
        Sequence[str | Path],
        flag(
            "Instead of training, measure the biases of these bundles on DATA: shifts, order, reach.",
            metavar="BUNDLE",
            cli_type=tuple[str, ...],
        ),
    ] = (),
    command: RecordedCommand = "",
) -> Report:
    """Measure the inductive biases of architectures on your images.

    This is the bias lab: it trains several architectures, and judges claims about what each assumes of images. Safe to
    interrupt: run the same command again to resume. More questions, sizes or seeds extend the lab.

        >>> report = vitrail.compare("digits", output="lab", bundles=["fashion"])
        >>> report["images"], report["bundles"][0]["name"]
        (360, 'fashion')
    """
    if bundles:
        if questions or families or sizes:
            raise UsageError("--bundles must be used without --questions, --families and --sizes: nothing is trained.")
        return _measure_bundles(data, Path(output), [str(bundle) for bundle in bundles], budget=budget, command=command)

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


def _measure_bundles(data: Any, output: Path, bundles: list[str], *, budget: str | None, command: str) -> Report:
    """Measure the biases of bundles on data without training, and write the page of the result."""
    for bundle in bundles:
        check_folder(bundle)
    from vitrail.lab.profile import profile
    from vitrail.lab.profile_page import check_profile_output, write_profile

    check_profile_output(output)
    profiles, pairs, split = profile(data, bundles, budget=budget, tell=say)
    return Report(write_profile(output, profiles, pairs, data=data, split=split, command=command))
