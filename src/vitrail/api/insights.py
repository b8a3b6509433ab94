"""Commands that look inside models and compare them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.api import tasks
from vitrail.api.flags import (
    BundlePath,
    Data,
    Device,
    Json,
    arg,
    given_command,
    lines_of_stdin,
)
from vitrail.bundles.folder import check_folder, read_config
from vitrail.core.errors import UsageError
from vitrail.core.terminal import (
    print_json,
    print_table,
    printable,
    say,
)
from vitrail.data.image_files import find_images
from vitrail.lab.registry import FAMILIES as COMPARED
from vitrail.lab.registry import QUESTIONS

if TYPE_CHECKING:
    from vitrail.lab.profile import Number


def inspect(
    bundle: Annotated[
        str,
        tyro.conf.Positional,
        arg(
            metavar="BUNDLE",
            help="A folder written by train, finetune or convert, or the embedded bundle fashion; a run, whose"
            " snapshots (train --snapshots N) show what grows over training; or the name of a model, untrained.",
        ),
    ],
    files: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(metavar="IMAGE", help="Images to inspect, folders of them, or - for names from stdin, one a line."),
    ],
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write: index.html, figures, inspect.json.")],
    evidence: Annotated[
        bool, arg(help="Also remove parts of the image and run the model again: hundreds of forward passes.")
    ] = False,
    data: Annotated[
        str | None,
        arg(metavar="DATA", help="More images (up to 64) for results that need many; any folder of images will do."),
    ] = None,
    against: Annotated[str | None, arg(metavar="BUNDLE", help="Another bundle to compare layers with.")] = None,
    patch: Annotated[
        tuple[int, int] | None,
        arg(metavar="ROW COLUMN", help="The patch to follow through the model, from 0; by default the centre."),
    ] = None,
    inside: Annotated[
        tuple[int, ...],
        arg(metavar="L", help="Show these layers step by step, from 0 or from the end (-1); by default three."),
    ] = (),
    layers: Annotated[
        tuple[int, ...], arg(metavar="L", help="Show only the attention of these layers, from 0 or from the end (-1).")
    ] = (),
    heads: Annotated[tuple[int, ...], arg(metavar="H", help="Show only the attention of these heads, from 0.")] = (),
    full: Annotated[
        bool,
        arg(help="Keep the attention of every head and patch, however large the page becomes, and write arrays.npz."),
    ] = False,
    device: Device = "auto",
    force: Annotated[bool, arg(help="Overwrite DIR if vitrail wrote it.")] = False,
    json: Annotated[bool, arg(help="Print the content of inspect.json.")] = False,
) -> None:
    """Show what happens inside a model, on one page: every step, attention, position embeddings, and more."""
    from vitrail.core.files import check_output

    check_output(output, force=force)
    made = tasks.inspect(
        bundle,
        find_images(files, lines_of_stdin()),
        output=output,
        evidence=evidence,
        data=data,
        against=against,
        patch=patch,
        inside=inside or None,
        layers=layers or None,
        heads=heads or None,
        full=full,
        device=device,
        force=force,
    )
    from vitrail.reports.inspect.page import LIMIT

    if (size := (output / "index.html").stat().st_size) > LIMIT and not full:
        say(f"note: the page has {size / 1e6:.1f} MB; fewer images or layers would make it smaller")
    for note in made.notes:
        say(f"note: {note}")
    if not made.found.is_trained:
        say("note: nothing says that this model was trained; maps of random weights mean nothing")
    return print_json(made.numbers) if json else print_table(None, [["page", str(output / "index.html")]])


def explain(
    bundle: BundlePath,
    files: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        arg(
            metavar="[IMAGE]",
            help="Up to 40 images, folders of them, or - for names from stdin; else embedded ones, if they fit BUNDLE.",
        ),
    ] = (),
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write: index.html, with the weights inside.")],
    open: Annotated[bool, arg(help="Open the page in a browser.")] = False,
    force: Annotated[bool, arg(help="Overwrite DIR if vitrail wrote it.")] = False,
) -> None:
    """Write a page that runs a small ViT in the browser and walks through every step of it: draw, mask, shuffle, switch
    parts off, and see the answer change."""
    from vitrail.core.files import check_output

    check_output(output, force=force)
    read_config(check_folder(bundle)).check_in_page()
    paths = find_images(files, lines_of_stdin()) if files else []

    from vitrail.bundles.bundle import load
    from vitrail.reports.explain.page import explain as write

    page = write(load(bundle), paths, output, force=force)
    print_table(None, [["page", str(page)]])
    if open:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())


def compare(
    data: Data,
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write; one that compare wrote is gone on with.")],
    questions: Annotated[
        tuple[str, ...], arg(metavar="NAME", help=f"What to ask: {', '.join(QUESTIONS)}; else all of it.")
    ] = (),
    families: Annotated[
        tuple[str, ...], arg(metavar="NAME", help=f"Which to compare; else {', '.join(COMPARED)}.")
    ] = (),
    sizes: Annotated[tuple[int, ...], arg(metavar="N", help="Numbers of training images; else chosen from DATA.")] = (),
    seeds: Annotated[int, arg(metavar="N", help="How often everything is trained, one less above 10,000 images.")] = 3,
    budget: Annotated[
        str | None, arg(metavar="TIME", help="20m, 90s, 2h: what does not fit is dropped, and named.")
    ] = None,
    jobs: Annotated[int | None, arg(metavar="N", help="Processes side by side; else as many as cores.")] = None,
    backend: Annotated[
        str, arg(metavar="B", help="loky (this machine), dask, or another that is registered with joblib.")
    ] = "loky",
    bundles: Annotated[
        tuple[str, ...],
        arg(metavar="BUNDLE", help="Instead of training, measure the biases of these on DATA: shifts, order, reach."),
    ] = (),
    json: Json = False,
) -> None:
    """The bias lab: measure what each architecture assumes of images, on yours, and judge the claims about it.

    Kill it whenever you like: the same command goes on. More questions, sizes or seeds extend it.
    """
    command = given_command()
    if bundles:
        if questions or families or sizes:
            raise UsageError("--bundles must come without --questions, --families and --sizes: nothing is trained.")
        return _profile(data, output, bundles, budget=budget, command=command, json=json)

    from vitrail.lab.compare import compare as run

    found = run(
        data,
        output,
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
    if json:
        return print_json(found)
    rows = [[one["id"], one["verdict"], one["question"], one["rule"]] for one in found["claims"]]
    print_table(("claim", "verdict", "question", "decided by"), rows)
    sys.stdout.write(f"report  {printable(str(output / 'index.html'))}\n")
    return None


def _profile(
    data: str, output: Path, bundles: tuple[str, ...], *, budget: str | None, command: str, json: bool
) -> None:
    for bundle in bundles:
        check_folder(bundle)
    from vitrail.lab.profile import profile
    from vitrail.lab.profile_page import check_profile_output, write_profile

    check_profile_output(output)
    found, pairs, split = profile(data, bundles, budget=budget, tell=say)
    written = write_profile(output, found, pairs, data=data, split=split, command=command)
    if json:
        return print_json(written)
    names = list(dict.fromkeys(name for one in found for name in one.numbers))
    rows = [[name, *(_measured(one.numbers.get(name)) for one in found)] for name in names]
    print_table(("measure", *(one.name for one in found)), rows)
    sys.stdout.write(f"report  {printable(str(output / 'index.html'))}\n")
    return None


def _measured(number: "Number | None") -> str:
    if number is None:
        return "-"
    low, high = number.interval
    reference = "" if number.reference is None else f"  [{number.reference:.3f}]"
    return f"{number.estimate.value:.3f} ({low:.3f} to {high:.3f}){reference}"
