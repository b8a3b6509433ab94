"""Models from other libraries and to other runtimes: convert, export, bench, weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitrail.api.flags import BundleOnDisk, Device, as_pair, command, file_flag, resolution_flag
from vitrail.api.results import Report, Rows
from vitrail.bundles.catalogue import list_published
from vitrail.bundles.formats.registry import FORMATS, written_formats
from vitrail.core.errors import UsageError
from vitrail.core.flags import argument, flag
from vitrail.core.settings import Bounds
from vitrail.data.image_files import find_images
from vitrail.data.sources.registry import open_data
from vitrail.inference.registry import PRECISIONS, TARGETS

if TYPE_CHECKING:
    from vitrail.data.sources.registry import AnyData


@command
def convert(
    source: Annotated[
        str | Path,
        argument(
            f"A checkpoint ({', '.join(FORMATS)}) or a bundle: a path, hf:owner/repository[@revision] of the"
            " Hugging Face Hub, the https:// address of a file, or a name of `vitrail weights`.",
            metavar="SRC",
            cli_type=str,
        ),
    ],
    destination: Annotated[str | Path, argument("Folder to write.", metavar="DST", cli_type=Path)],
    *,
    to: Annotated[str, flag(f"Format to write: {', '.join(written_formats())}.", metavar="FORMAT")] = "vitrail",
    model: Annotated[
        str | None, flag("The model of SRC, if its files do not state it (the number of heads).", metavar="NAME")
    ] = None,
    resolution: Annotated[
        int | tuple[int, int] | None, resolution_flag("Its input size, if the grid is not square; with --model.")
    ] = None,
    preprocess: Annotated[
        Iterable[str],
        flag(
            "Preprocessing, if SRC does not state it: mean=0.5 std=0.5 resize=squash",
            metavar="KEY=VALUE",
            cli_type=tuple[str, ...],
        ),
    ] = (),
    labels: Annotated[str | Path | None, file_flag("Class names: a JSON list, or one name per line.")] = None,
    images: Annotated[
        str | Path | None,
        flag("Images to compare both models on; default: embedded ones.", metavar="DIR", cli_type=str),
    ] = None,
    verify: Annotated[bool, flag("Compare with the library's own model, if it can be imported.")] = True,
    sha256: Annotated[str | None, flag("Refuse a file of weights that has another SHA-256.", metavar="HEX")] = None,
    force: Annotated[bool, flag("Overwrite DST if vitrail wrote it.")] = False,
) -> Report:
    """Convert weights of other libraries to a bundle, or a bundle to their formats, and verify the result.

    >>> report = vitrail.convert("fashion", "fashion-timm", to="timm", verify=False)
    >>> report["model"], report["proofs"]
    ('ViT-Fashion/4', [{'library': 'timm', 'not_verified': 'not asked for'}])
    >>> vitrail.convert("fashion-timm", "again", verify=False)["from"]
    'timm'
    """
    from vitrail.bundles.convert import UserHints, read_labels
    from vitrail.bundles.convert import convert as run

    size = None if resolution is None else as_pair(resolution)
    hints = UserHints(model, size, tuple(preprocess), None if labels is None else read_labels(Path(labels)))
    embedded = images is None
    shown = open_data("fashion-40").splits["test"].images if embedded else find_images([str(images)], stdin=True)
    return Report(
        run(
            str(source),
            Path(destination),
            to,
            hints=hints,
            verifies=verify,
            images=list(shown),
            force=force,
            sha256=sha256,
        )
    )


@command
def bench(
    bundle: BundleOnDisk,
    *,
    data: Annotated[
        "AnyData | None",
        flag(
            "Images to compare answers on, sorted into classes or not; with classes, also accuracy.",
            metavar="DATA",
            cli_type=str,
        ),
    ] = None,
    split: Annotated[
        str | None, flag("train, val or test; default: test, otherwise val, otherwise all images.", metavar="S")
    ] = None,
    threads: Annotated[int | None, flag("Number of computing threads; default: every core.", metavar="N")] = None,
    device: Device = None,
) -> Report:
    """Measure every engine in every precision on this machine: speed, start, memory, size, answers and accuracy. What
    it finds is kept; --engine auto and --precision auto read it.

        >>> found = vitrail.bench("fashion", threads=1)
        >>> fastest = max(found["ways"], key=lambda row: row["images_per_second"])
        >>> fastest["engine"] in ("torch", "onnx", "openvino"), fastest["same"] <= fastest["images"]
        (True, True)
    """
    from vitrail.evaluation.benchmark import benchmark_engines as run

    return Report(run(str(bundle), data, split=split, threads=threads, device=device or "auto"))


@command
def export(
    bundle: BundleOnDisk,
    output: Annotated[str | Path, argument("Folder to write.", metavar="OUT", cli_type=Path)],
    *,
    to: Annotated[str, flag(f"What to write: {', '.join(TARGETS)}.", metavar="TARGET")],
    precision: Annotated[
        str, flag(f"Precision: {', '.join(PRECISIONS)}, where the target has it.", metavar="P")
    ] = "float32",
    batch: Annotated[
        int | str, flag("Number of images that the model takes at a time.", metavar="N|any", cli_type=str)
    ] = "any",
    merge: Annotated[
        int | str | None,
        flag(
            "Merge so many tokens in front of each layer (ViT); auto searches, on --data.",
            metavar="R|auto",
            cli_type=str,
        ),
    ] = None,
    data: Annotated[
        "AnyData | None",
        flag(
            "With --merge: images whose answers are compared, sorted or not; labels are not used.",
            metavar="DATA",
            cli_type=str,
        ),
    ] = None,
    tolerance: Annotated[
        float, flag("With --merge auto: largest share of answers that may change.", metavar="T")
    ] = 0.02,
    force: Annotated[bool, flag("Overwrite OUT if vitrail wrote it.")] = False,
) -> Report:
    """Write a model in the format of another runtime, with labels, preprocessing, the proof that it answers as torch
    does, and a README whose program runs it without vitrail.

        >>> proof = vitrail.export("fashion", "exported", to="torch")
        >>> sorted(proof["files"]), proof["same_answers"] == proof["pictures"]
        (['model.pt2'], True)
    """
    from vitrail.inference.targets.base import check_export
    from vitrail.inference.targets.base import export as run

    path, folder = str(bundle), Path(output)
    how: dict[str, Any] = {"precision": precision, "batch": str(batch), "force": force}
    check_export(path, folder, to, **how)
    Bounds(0, 1).check("tolerance", tolerance)
    if merge is None:
        if data is not None:
            raise UsageError(f"Data must be given with --merge, got {data!r} without it.")
        return Report(run(path, folder, to, **how))
    from vitrail.evaluation.merge_search import merged_bundle

    with merged_bundle(path, str(merge), data, tolerance) as (merged, about):
        return Report(run(merged, folder, to, **how, about={"merging": about}))


@command
def weights(
    pattern: Annotated[
        str,
        argument("Only names, models or repositories like this one: vit-b16, dino, '*in21k'.", metavar="[PATTERN]"),
    ] = "*",
) -> Rows:
    """List public checkpoints that `vitrail convert NAME DST` fetches and reads. Nothing is fetched here.

    >>> [published.name for published in vitrail.weights("deit")]
    ['deit-ti16.in1k', 'deit-s16.in1k', 'deit-b16.in1k', 'deit-b16.in1k-384']
    """
    return Rows(list_published(pattern))
