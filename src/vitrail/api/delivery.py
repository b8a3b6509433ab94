"""The commands `convert`, `rename`, `export`, `bench` and `weights`, about bundles and other libraries and runtimes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from vitrail.api.parameters import (
    BundleOnDisk,
    Device,
    Licence,
    as_pair,
    command,
    file_flag,
    folder_flag,
    resolution_flag,
)
from vitrail.api.results import Report, Rows
from vitrail.bundles.card import check_licence
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


_HINTS = "if SRC does not state its model or preprocessing"
_VERIFICATION = "verification"


@command
def convert(
    source: Annotated[
        str | Path,
        argument(
            f"A checkpoint ({', '.join(FORMATS)}) or a bundle: a path, a name of `vitrail weights`, the https://"
            " address of a file, or hf:owner/repository[@revision] on the Hugging Face Hub.",
            metavar="SRC",
            cli_type=str,
        ),
    ],
    destination: Annotated[str | Path, argument("Folder to write.", metavar="DST", cli_type=Path)],
    *,
    to: Annotated[str, flag(f"Format to write: {', '.join(written_formats())}.", metavar="FORMAT")] = "vitrail",
    model: Annotated[
        str | None,
        flag("Model of SRC, if its files do not state the number of heads.", metavar="NAME", group=_HINTS),
    ] = None,
    resolution: Annotated[
        int | tuple[int, int] | None,
        resolution_flag("Input size of SRC, if its grid is not square; with --model.", group=_HINTS),
    ] = None,
    preprocess: Annotated[
        Iterable[str],
        flag(
            "Preprocessing of SRC, such as mean=0.5 std=0.5 resize=squash.",
            metavar="KEY=VALUE",
            group=_HINTS,
            cli_type=tuple[str, ...],
        ),
    ] = (),
    labels: Annotated[str | Path | None, file_flag("File of class names: a JSON list, or one name per line.")] = None,
    images: Annotated[
        str | Path | None,
        flag(
            "Images on which both models are compared; default: embedded images.",
            metavar="DIR",
            group=_VERIFICATION,
            cli_type=str,
        ),
    ] = None,
    verify: Annotated[
        bool, flag("Compare with the library's own model, if the library is installed.", group=_VERIFICATION)
    ] = True,
    sha256: Annotated[
        str | None, flag("Expected SHA-256 of the file of weights.", metavar="HEX", group=_VERIFICATION)
    ] = None,
    licence: Licence = None,
    force: Annotated[bool, flag("Overwrite DST if vitrail wrote it.")] = False,
) -> Report:
    """Convert weights from and to the formats of other libraries.

    The result is verified: both models must give the same outputs on the same images.

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
    test_images = open_data("fashion-40").splits["test"].images if embedded else find_images([str(images)], stdin=True)
    return Report(
        run(
            str(source),
            Path(destination),
            to,
            hints=hints,
            verifies=verify,
            images=list(test_images),
            force=force,
            sha256=sha256,
            licence=None if licence is None else check_licence(licence),
        )
    )


@command
def rename(
    bundle: BundleOnDisk,
    names: Annotated[
        Mapping[str, str] | Iterable[str],
        argument(
            "Labels to rename, such as 3=cat 'old name=new name'. Swaps (a=b b=a) are possible.",
            metavar="OLD=NEW",
            cli_type=tuple[str, ...],
            python='In Python as {"3": "cat"}, or as texts.',
        ),
    ],
    *,
    output: Annotated[
        str | Path | None, folder_flag("Write a renamed copy to this folder; default: change BUNDLE.")
    ] = None,
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
) -> Report:
    """Rename labels of a bundle.

    The weights stay the same bytes, and the bundle keeps its scores. The bundle is replaced atomically.

        >>> report = vitrail.rename("fashion", {"Bag": "Handbag"}, output="clothes")
        >>> report["labels"][:2], vitrail.load("clothes").provenance["scores"]["accuracy"]
        (['Ankle boot', 'Handbag'], 0.9297)
    """
    from vitrail.bundles.rename import rename_labels

    folder = None if output is None else Path(output)
    renamed, labels = rename_labels(bundle, names, folder, force=force)
    return Report(bundle=str(bundle if folder is None else folder), renamed=renamed, labels=list(labels))


@command
def bench(
    bundle: BundleOnDisk,
    *,
    data: Annotated[
        "AnyData | None",
        flag(
            "Images on which predictions are compared. If they have classes, accuracy is measured, too.",
            metavar="DATA",
            cli_type=str,
        ),
    ] = None,
    split: Annotated[
        str | None, flag("train, val or test; default: test, otherwise val, otherwise all images.", metavar="S")
    ] = None,
    threads: Annotated[int | None, flag("Number of computing threads; default: all cores.", metavar="N")] = None,
    device: Device = None,
) -> Report:
    """Measure the speed of every engine and precision on this machine.

    Start-up time, memory, size, predictions and accuracy are measured, too. The results are stored for --engine auto
    and --precision auto.

        >>> report = vitrail.bench("fashion", threads=1)
        >>> fastest = max(report["ways"], key=lambda row: row["images_per_second"])
        >>> fastest["engine"] in ("torch", "onnx", "openvino"), fastest["same"] <= fastest["images"]
        (True, True)
    """
    from vitrail.evaluation.benchmark import benchmark_engines as run

    return Report(run(str(bundle), data, split=split, threads=threads, device=device or "auto"))


_MERGING = "token merging"


@command
def export(
    bundle: BundleOnDisk,
    output: Annotated[str | Path, argument("Folder to write.", metavar="OUT", cli_type=Path)],
    *,
    to: Annotated[str, flag(f"Target runtime: {', '.join(TARGETS)}.", metavar="TARGET")],
    precision: Annotated[
        str, flag(f"Precision: {', '.join(PRECISIONS)} (if the target supports it).", metavar="P")
    ] = "float32",
    batch: Annotated[int | str, flag("Batch size of the exported model.", metavar="N|any", cli_type=str)] = "any",
    merge: Annotated[
        int | str | None,
        flag(
            "Merge R tokens before each layer (ViT only); auto searches for the largest R, with --data.",
            metavar="R|auto",
            group=_MERGING,
            cli_type=str,
        ),
    ] = None,
    data: Annotated[
        "AnyData | None",
        flag(
            "With --merge: images on which predictions are compared; labels are not used.",
            metavar="DATA",
            group=_MERGING,
            cli_type=str,
        ),
    ] = None,
    tolerance: Annotated[
        float,
        flag("With --merge auto: the largest share of predictions that may change.", metavar="T", group=_MERGING),
    ] = 0.02,
    force: Annotated[bool, flag("Overwrite OUT if vitrail wrote it.")] = False,
) -> Report:
    """Export a model to another runtime and verify it against torch.

    The output folder has the model, labels, preprocessing, the result of the verification, and a README with a program
    that runs the model without vitrail.

        >>> proof = vitrail.export("fashion", "exported", to="torch")
        >>> sorted(proof["files"]), proof["same_answers"] == proof["pictures"]
        (['model.pt2'], True)
    """
    from vitrail.inference.targets.base import check_export
    from vitrail.inference.targets.base import export as run

    path, folder = str(bundle), Path(output)
    settings: dict[str, Any] = {"precision": precision, "batch": str(batch), "force": force}
    check_export(path, folder, to, **settings)
    Bounds(0, 1).check("tolerance", tolerance)
    if merge is None:
        if data is not None:
            raise UsageError(f"Data must be given with --merge, got {data!r} without it.")
        return Report(run(path, folder, to, **settings))
    from vitrail.evaluation.merge_search import merged_bundle

    with merged_bundle(path, str(merge), data, tolerance) as (merged, about):
        return Report(run(merged, folder, to, **settings, about={"merging": about}))


@command
def weights(
    pattern: Annotated[
        str,
        argument(
            "Show only checkpoints whose name, model or repository matches: vit-b16, dino, '*in21k'.",
            metavar="[PATTERN]",
        ),
    ] = "*",
) -> Rows:
    """List public checkpoints that `vitrail convert` can fetch by name.

    The list comes with Vitrail, so this command works offline. `vitrail convert` downloads a checkpoint by its name.

    >>> [published.name for published in vitrail.weights("deit")]
    ['deit-ti16.in1k', 'deit-s16.in1k', 'deit-b16.in1k', 'deit-b16.in1k-384']
    """
    return Rows(list_published(pattern))
