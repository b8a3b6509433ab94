"""Commands that take models from other libraries and to other runtimes."""

from pathlib import Path
from typing import Annotated, Any

import tyro

from vitrail.api.flags import (
    BundlePath,
    Device,
    Json,
    arg,
    lines_of_stdin,
    parse_resolution,
)
from vitrail.bundles.formats.registry import FORMATS, written_formats
from vitrail.core.errors import UsageError
from vitrail.core.terminal import (
    print_bench,
    print_conversion,
    print_json,
    print_table,
    say,
)
from vitrail.data.image_files import find_images
from vitrail.data.sources.registry import open_data
from vitrail.inference.registry import PRECISIONS, TARGETS


def convert(
    source: Annotated[
        str,
        tyro.conf.Positional,
        arg(
            metavar="SRC",
            help=f"A checkpoint ({', '.join(FORMATS)}) or a bundle: a path, hf:owner/repository[@revision] of the"
            " Hugging Face Hub, the https:// address of a file, or a name of `vitrail weights`.",
        ),
    ],
    destination: Annotated[Path, tyro.conf.Positional, arg(metavar="DST", help="Folder to write.")],
    *,
    to: Annotated[str, arg(metavar="FORMAT", help=f"Format to write: {', '.join(written_formats())}.")] = "vitrail",
    model: Annotated[
        str | None, arg(metavar="NAME", help="The model of SRC, if its files do not state it (the number of heads).")
    ] = None,
    resolution: Annotated[
        str | None, arg(metavar="R", help="Its input size, if the grid is not square; with --model.")
    ] = None,
    preprocess: Annotated[
        tuple[str, ...],
        arg(metavar="KEY=VALUE", help="Preprocessing, if SRC does not state it: mean=0.5 std=0.5 resize=squash"),
    ] = (),
    labels: Annotated[Path | None, arg(metavar="FILE", help="Class names: a JSON list, or one name per line.")] = None,
    images: Annotated[
        str | None, arg(metavar="DIR", help="Images to compare both models on; default: embedded ones.")
    ] = None,
    verify: Annotated[bool, arg(help="Compare with the library's own model, if it can be imported.")] = True,
    sha256: Annotated[str | None, arg(metavar="HEX", help="Refuse a file of weights that has another SHA-256.")] = None,
    force: Annotated[bool, arg(help="Overwrite DST if vitrail wrote it.")] = False,
    json: Json = False,
) -> None:
    """Convert weights of other libraries to a bundle, or a bundle to their formats, and verify the result."""
    from vitrail.bundles.convert import Told, read_labels
    from vitrail.bundles.convert import convert as run

    size = None if resolution is None else parse_resolution(resolution)
    told = Told(model, size, preprocess, None if labels is None else read_labels(labels))
    shown = open_data("fashion-40").splits["test"].images if images is None else find_images([images], lines_of_stdin())
    report = run(source, destination, to, told=told, verifies=verify, images=list(shown), force=force, sha256=sha256)
    for note in report["notes"]:
        say(f"note: {note}")
    return print_json(report) if json else print_conversion(report)


def bench(
    bundle: BundlePath,
    *,
    data: Annotated[
        str | None,
        arg(
            metavar="DATA",
            help="Images to compare answers on, sorted into classes or not; with classes, also accuracy.",
        ),
    ] = None,
    split: Annotated[
        str | None, arg(metavar="S", help="train, val or test; default: test, otherwise val, otherwise all images.")
    ] = None,
    threads: Annotated[int | None, arg(metavar="N", help="Number of computing threads; default: every core.")] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure every engine in every precision on this machine: speed, start, memory, size, answers and accuracy. What
    it finds is kept; --engine auto and --precision auto read it."""
    from vitrail.evaluation.benchmark import bench as run

    found = run(bundle, data, split=split, threads=threads, device=device)
    for one in found["left_out"]:
        say(f"note: {one['engine']} {one['precision']} is left out: {one['reason']}")
    for note in found["notes"]:
        say(f"note: {note}")
    return print_json(found) if json else print_bench(found)


def export(
    bundle: BundlePath,
    output: Annotated[Path, tyro.conf.Positional, arg(metavar="OUT", help="Folder to write.")],
    *,
    to: Annotated[str, arg(metavar="TARGET", help=f"What to write: {', '.join(TARGETS)}.")],
    precision: Annotated[
        str, arg(metavar="P", help=f"Precision: {', '.join(PRECISIONS)}, where the target has it.")
    ] = "float32",
    batch: Annotated[str, arg(metavar="N|any", help="Number of images that the model takes at a time.")] = "any",
    merge: Annotated[
        str | None,
        arg(metavar="R|auto", help="Merge so many tokens in front of each layer (ViT); auto searches, on --data."),
    ] = None,
    data: Annotated[
        str | None,
        arg(
            metavar="DATA", help="With --merge: images whose answers are compared, sorted or not; labels are not used."
        ),
    ] = None,
    tolerance: Annotated[
        float, arg(metavar="T", help="With --merge auto: largest share of answers that may change.")
    ] = 0.02,
    force: Annotated[bool, arg(help="Overwrite OUT if vitrail wrote it.")] = False,
    json: Json = False,
) -> None:
    """Write a model in the format of another runtime, with labels, preprocessing, the proof that it answers as torch
    does, and a README whose program runs it without vitrail."""
    proof = _export(bundle, output, to, merge, data, tolerance, precision=precision, batch=batch, force=force)
    if json:
        return print_json(proof)
    same = f"{proof['same_answers']} of {proof['pictures']} answers as torch's"
    rows = [["model", ", ".join(proof["files"])], ["to", f"{to}, {output}"]]
    if "merging" in proof:
        from vitrail.inference.targets.readme import merging_words

        rows.append(["merges", merging_words(proof["merging"])])
    return print_table(None, [*rows, ["proof", f"{same}, logits at most {proof['max_logit_difference']:.1e} apart"]])


def _export(
    bundle: str, output: Path, to: str, merge: str | None, data: str | None, tolerance: float, **how: Any
) -> dict[str, Any]:
    from vitrail.core.settings import check_share
    from vitrail.inference.targets.base import check_export, export

    check_export(bundle, output, to, **how)
    check_share("tolerance", tolerance, 1)
    if merge is None:
        if data is not None:
            raise UsageError(f"Data must be given with --merge, got {data!r} without it.")
        return export(bundle, output, to, **how)
    from vitrail.evaluation.merged import merged_bundle

    with merged_bundle(bundle, merge, data, tolerance) as (merged, about):
        return export(merged, output, to, **how, about={"merging": about})
