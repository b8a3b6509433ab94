"""The commands of `vitrail faces`. Large packages are imported only when a command runs."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vitrail.api.flags import AS_USUAL, BundlePath, Data, Device, Flags, Group, Json, arg, given_command
from vitrail.bundles.folder import check_folder
from vitrail.core.errors import DamagedError, UsageError
from vitrail.core.settings import check_integer
from vitrail.core.terminal import print_json, print_run, print_table, printable, say
from vitrail.data.image_files import find_images, is_file
from vitrail.models import zoo
from vitrail.training.options import Options
from vitrail.training.recipe import find_recipe

GalleryPath = Annotated[Path, tyro.conf.Positional, arg(metavar="GALLERY", help="A file that `faces enroll` made.")]
Split = Annotated[
    str | None, arg(metavar="S", help="train, val or test; default: test, otherwise val, otherwise all images.")
]
Without = Annotated[
    Path | None,
    arg(metavar="FILE", help="Leave out these people, a name a line: those trained on, as for train --people."),
]
Landmarks = Annotated[
    Path | None,
    arg(
        metavar="FILE",
        help="Align faces by their five points (.csv or .json), as in training; files are named below DATA, or below"
        " the folder of FILE.",
    ),
]
Images = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    arg(metavar="IMAGES", help="Images of faces, folders of them, or quoted patterns such as 'photos/*.jpg'."),
]


def train(
    data: Data,
    *,
    output: Annotated[Path, arg(metavar="RUN", help="Folder to write: config, metrics, checkpoints, bundle, report.")],
    model: Annotated[str | None, arg(metavar="NAME", help="A new model: FaceViT-Ti or another name.")] = None,
    source: Annotated[str | None, arg(name="from", metavar="BUNDLE", help="Begin with this bundle instead.")] = None,
    people: Annotated[
        Path | None,
        arg(
            metavar="FILE",
            help="Who is trained on, a name a line; all others are the test. Default: drawn by the seed.",
        ),
    ] = None,
    test: Annotated[float, arg(metavar="X", help="Share of the people that are drawn for the test.")] = 0.2,
    landmarks: Annotated[
        Path | None,
        arg(metavar="FILE", help="Five points of each face (.csv or .json), by which faces are aligned to 112 px."),
    ] = None,
    resolution: Annotated[int | None, arg(metavar="R", help="Input size; default: that of the model.")] = None,
    recipe: Annotated[str, arg(metavar="R", help="A recipe of the package, or a .toml file.")] = "faces",
    running: Flags = AS_USUAL,
) -> None:
    """Train an embedding of faces. It may be killed at any time: --resume auto continues.

    DATA has one folder a person. People are split, not images: nobody who is trained on is in the test, and the share
    `holdout` of those trained on is held out, by whom training is judged meanwhile.
    """
    chosen = running.adjust(find_recipe(recipe))
    options = Options(**dataclasses.asdict(running.options))
    if model is not None:
        zoo.find(model)
    if source is not None:
        check_folder(source)
    from vitrail.faces.train import train_faces

    result = train_faces(
        data,
        output,
        chosen,
        options,
        model=model,
        source=source,
        people=people,
        test=test,
        landmarks=landmarks,
        resolution=resolution,
        resumes=running.resume == "auto",
        force=running.force,
        command=given_command(),
    )
    if result.is_first and result.folder is not None:
        print_run(result.sentence, result.folder)


def evaluate(
    bundle: BundlePath,
    data: Data,
    *,
    pairs: Annotated[
        Path | None,
        arg(metavar="FILE", help="Only the pairs of this file, in the format of LFW; default: all pairs."),
    ] = None,
    groups: Annotated[
        Path | None, arg(metavar="FILE", help="A .csv of person,group: error rates of each group, too.")
    ] = None,
    without: Without = None,
    landmarks: Landmarks = None,
    split: Split = None,
    seed: Annotated[int, arg(metavar="S", help="Seed of folds, of unknown people and of the intervals.")] = 0,
    output: Annotated[Path | None, arg(metavar="DIR", help="Also write a report page to this folder.")] = None,
    show_images: Annotated[bool, arg(help="Show the images of the worst pairs on the page.")] = False,
    force: Annotated[bool, arg(help="Overwrite DIR if vitrail wrote it.")] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure how well a bundle tells people apart: verification, identification, open set; with intervals.

    The classes of DATA are people, best in a folder for each person; they should be people that the bundle was not
    trained on.
    """
    check_integer("seed", seed, low=0, high=2**63 - 1)
    if show_images and output is None:
        raise UsageError("--show-images must come with --output DIR: images are shown on the report page alone.")
    if output is not None:
        from vitrail.core.files import check_output

        check_output(output, force=force)
    check_folder(bundle)
    from vitrail.faces.operations import evaluate as judge

    _say_training(bundle, landmarks, data, without)
    given: dict[str, Any] = {"pairs": pairs, "groups": groups, "without": without, "landmarks": landmarks}
    found = judge(bundle, data, split=split, seed=seed, device=device, **given)
    if output is not None:
        from vitrail.faces.page import write_page

        write_page(found, output, shows_images=show_images, command=given_command(), force=force)
    for note in found.report["notes"]:
        say(f"note: {note}")
    if json:
        return print_json(found.report)
    _print_report(found.report)
    return None if output is None else print_table(None, [["page", str(output / "index.html")]])


def enroll(
    bundle: BundlePath,
    gallery: Annotated[
        Path, tyro.conf.Positional, arg(metavar="GALLERY", help="File to add to; it is made if it does not exist.")
    ],
    name: Annotated[str, tyro.conf.Positional, arg(metavar="NAME", help="Who the images show.")],
    images: Images,
    *,
    landmarks: Landmarks = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Add a person, or more images of one, to a gallery. No image is kept: only embeddings and hashes.

    Have the person's consent. All images are added, or none.
    """
    if is_file(name):
        raise UsageError(f"NAME must be who the images show, got the file {name!r}. Say BUNDLE GALLERY NAME IMAGES.")
    files = find_images(images)
    check_folder(bundle)
    from vitrail.faces.operations import enroll as run

    _say_training(bundle, landmarks)
    found = run(bundle, gallery, name, files, landmarks=landmarks, device=device)
    if found["threshold_dropped"]:
        say(f"note: the threshold of identify was for other people: calibrate {gallery} again")
    if json:
        return print_json(found)
    shown = f"{found['name']}: {found['new']:,} new, {found['images']:,} in all"
    return print_table(None, [["images", shown], ["gallery", f"{found['gallery']}: {_people(found['people'])}"]])


def remove(
    gallery: GalleryPath,
    name: Annotated[str, tyro.conf.Positional, arg(metavar="NAME", help="Who to remove.")],
    *,
    json: Json = False,
) -> None:
    """Remove a person and every trace of their data from a gallery and its journal.

    If another program reads the gallery for more than five seconds, or the disk has no room for a second copy of it,
    the exit code is 1 and traces remain: give the same command again when that has ended.
    """
    from vitrail.faces.gallery import Gallery

    with Gallery.open(gallery) as opened:
        is_removed = opened.remove(name)
        people = len(opened.people())
    if not is_removed:
        say(f"note: {name!r} was not enrolled (any more); what an earlier removal had left is gone now")
    if json:
        return print_json({"gallery": str(gallery), "name": name, "removed": is_removed, "people": people})
    shown = f"{name}, with every trace" if is_removed else "the traces that an earlier removal had left"
    return print_table(None, [["removed", shown], ["gallery", f"{gallery}: {_people(people)}"]])


def verify(
    bundle: BundlePath,
    one: Annotated[str, tyro.conf.Positional, arg(metavar="A", help="An image of a face.")],
    other: Annotated[str, tyro.conf.Positional, arg(metavar="B", help="Another one.")],
    *,
    gallery: Annotated[
        Path | None, arg(metavar="GALLERY", help="Take the threshold from this gallery, as `calibrate` has set it.")
    ] = None,
    landmarks: Landmarks = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Do two images show the same person? Without a calibrated threshold, a score is all that is printed."""
    check_folder(bundle)
    from vitrail.faces.operations import verify as run

    _say_training(bundle, landmarks)
    found = run(bundle, one, other, gallery=gallery, landmarks=landmarks, device=device)
    if found["same"] is None:
        _say_no_threshold("verify")
    if json:
        return print_json(found)
    answer = {True: "the same person", False: "different people", None: "-"}[found["same"]]
    return print_table(None, [["score", f"{found['score']:.4f}"], *_threshold_rows(found), ["answer", answer]])


def identify(
    bundle: BundlePath,
    gallery: GalleryPath,
    images: Images,
    *,
    top_k: Annotated[int, arg(metavar="K", help="How many people to show for each image.")] = 3,
    landmarks: Landmarks = None,
    device: Device = "auto",
    json: Annotated[bool, arg(help="Print a JSON line for each image instead of a table.")] = False,
) -> None:
    """Who is it? The most alike people of a gallery or, below its calibrated threshold, "unknown".

    Without a threshold, scores are all that is printed.
    """
    check_integer("top_k", top_k, low=1, high=1_000_000)
    files = find_images(images)
    check_folder(bundle)
    from vitrail.faces.operations import identify as run

    errors, has_told = [], False
    width = max(len(printable(file)) for file in files)
    _say_training(bundle, landmarks)
    for row in run(bundle, gallery, files, top_k=top_k, landmarks=landmarks, device=device):
        if "error" in row:
            errors.append(row["error"])
        elif row["threshold"] is None and not has_told:
            has_told = True
            _say_no_threshold("identify")
        if json:
            print_json(row)
        else:
            sys.stdout.write(f"{printable(row['file']):<{width}}  {_answer(row)}\n")
        sys.stdout.flush()
    if errors:
        raise DamagedError(f"{len(errors):,} of {len(files):,} images could not be read; the first: {errors[0]}")


def calibrate(
    bundle: BundlePath,
    gallery: GalleryPath,
    data: Data,
    *,
    far: Annotated[float, arg(metavar="F", help="The rate of false accepts that you can bear, such as 0.01.")],
    task: Annotated[Literal["both", "verify", "identify"], arg(help="Which threshold to set.")] = "both",
    without: Without = None,
    landmarks: Landmarks = None,
    split: Split = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Set the thresholds of a gallery for a rate of false accepts, on images of people who are not enrolled.

    For verify, F is the share of pairs of different people that are taken for one person; for identify, the share of
    strangers' images that get a name in this gallery, however many people it has. An F that DATA is too small to
    measure is refused.
    """
    check_folder(bundle)
    from vitrail.faces.gallery import TASKS
    from vitrail.faces.operations import calibrate as run

    tasks = TASKS if task == "both" else (task,)
    _say_training(bundle, landmarks, data, without)
    given: dict[str, Any] = {"split": split, "without": without, "landmarks": landmarks}
    found = run(bundle, gallery, data, far, tasks=tasks, device=device, **given)
    if json:
        return print_json(found)
    rows = []
    for name in tasks:
        one = found[name]
        low, high = one["interval"]
        unit = "pairs" if name == "verify" else f"images, {_people(one['gallery_people'])} enrolled"
        measured = f"{one['errors']:,} of {one['trials']:,} {unit}"
        rows.append([name, f"{one['threshold']:.4f}", measured, f"{low:.2%} to {high:.2%}", _percent(one["tar"])])
    print_table(("task", "threshold", "false accepts in DATA", "95 % interval", "true accepts"), rows)
    return None


def _people(count: int) -> str:
    return "1 person" if count == 1 else f"{count:,} people"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _spoken(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "not enough data"
    return f"{value:.2%}" if interval is None else f"{value:.2%} ({interval[0]:.2%} to {interval[1]:.2%})"


def _say_training(bundle: str, landmarks: Path | None, data: str = "", without: Path | None = None) -> None:
    """Say so if faces are not prepared as those that the bundle was trained on, or if they may be the same people."""
    from vitrail.bundles.metadata import read_parts
    from vitrail.faces.align import BY_LANDMARKS, UNALIGNED

    provenance = read_parts(bundle, weights=False).provenance
    faces = provenance.get("faces")
    if not isinstance(faces, dict):
        return
    if landmarks is None and faces.get("alignment") == BY_LANDMARKS:
        say("note: this bundle was trained on faces aligned by landmarks; without --landmarks, they look different")
    if landmarks is not None and faces.get("alignment") == UNALIGNED:
        say("note: this bundle was trained on faces that were not aligned; with --landmarks, they look different")
    trained_on = str(provenance.get("data")).rpartition(":")[0]
    if data and without is None and Path(trained_on).name == Path(data).name:
        say(
            f"note: this bundle was trained on people of {trained_on!r}, whom it tells apart better than strangers:"
            " leave them out by --without RUN/people.txt"
        )


def _say_no_threshold(task: str) -> None:
    say(
        f"note: no threshold is set, so nobody is accepted or refused: `vitrail faces calibrate` sets that of {task} in"
        " a gallery, for your data and the rate of errors that you can bear"
    )


def _threshold_rows(found: dict[str, Any]) -> list[list[str]]:
    if found["threshold"] is None:
        return []
    low, high = found["far_interval"]
    about = f"{found['threshold']:.4f} (false accepts {found['far']:g} demanded, {low:.2%} to {high:.2%} measured)"
    return [["threshold", about]]


def _answer(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"error: {printable(row['error'])}"
    shown = ", ".join(f"{printable(one['name'])} {one['score']:.4f}" for one in row["candidates"])
    answer = {True: printable(row["name"] or ""), False: "unknown", None: "-"}[row["accepted"]]
    return f"{answer} ({shown})"


def _print_report(report: dict[str, Any]) -> None:
    pairs = f"{report['genuine']:,} genuine pairs, {report['impostor']:,} impostor pairs"
    rows = [
        ["data", f"{report['data']} ({report['split']}): {report['images']:,} images of {_people(report['people'])}"],
        ["pairs", pairs],
        ["equal error rate", _spoken(report["eer"], report["eer_interval"])],
    ]
    rows += [[f"TAR at FAR {row['far']:g}", _spoken(row["tar"], row["interval"])] for row in report["tar"]]
    if report["accuracy"] is not None:
        folds = f"; {len(report['accuracy_folds'])} folds"
        rows.append(["accuracy", _spoken(report["accuracy"], report["accuracy_interval"]) + folds])
    if report["rank1"] is not None:
        rows.append(["rank-1 identification", _spoken(report["rank1"], report["rank1_interval"])])
    rows += [[f"DIR at FAR {row['far']:g}", _spoken(row["dir"], row["interval"])] for row in report["dir"]]
    print_table(None, rows)
    if "groups" in report:
        sys.stdout.write("\n")
        fars = [one["far"] for one in max((row["at"] for row in report["groups"]), key=len, default=[])]
        cells = []
        for row in report["groups"]:
            at = {one["far"]: f"{one['group_far']:.3%} / {1 - one['tar']:.1%}" for one in row["at"]}
            own = [row["group"], f"{row['people']:,}", _spoken(row["eer"], row["eer_interval"])]
            cells.append([*own, *(at.get(far, "-") for far in fars)])
        names = [f"false accepts / refusals at FAR {far:g} of all" for far in fars]
        print_table(("group", "people", "equal error rate", *names), cells)
    sys.stdout.write("\n")


FACES = Group(
    "Recognise faces: train and evaluate an embedding, keep a gallery of people, verify and identify them.",
    {
        "train": train,
        "evaluate": evaluate,
        "enroll": enroll,
        "remove": remove,
        "verify": verify,
        "identify": identify,
        "calibrate": calibrate,
    },
)
