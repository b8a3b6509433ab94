"""The commands of `vitrail faces`: train, evaluate, enroll, remove, verify, identify and calibrate."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from vitrail.api.parameters import (
    BundleOnDisk,
    DataOnDisk,
    Device,
    RecordedCommand,
    RunKeywords,
    command,
    file_flag,
    folder_flag,
)
from vitrail.api.results import Report, Rows
from vitrail.api.training_commands import find_any_recipe, prepare_run
from vitrail.bundles.folder import check_folder
from vitrail.core.errors import UsageError
from vitrail.core.files import check_output
from vitrail.core.flags import argument, flag, python_only
from vitrail.core.settings import check_integer
from vitrail.core.terminal import say
from vitrail.data.image_files import find_images, is_file
from vitrail.models import zoo
from vitrail.training.recipe import Recipe

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.training.run import Result

GalleryPath = Annotated[
    str | Path, argument("Gallery file written by `faces enroll`.", metavar="GALLERY", cli_type=Path)
]
Split = Annotated[
    str | None,
    flag("Split of DATA: train, val or test; default: test, otherwise val, otherwise all images.", metavar="S"),
]
Without = Annotated[
    str | Path | None,
    file_flag("File of names of people to leave out, one per line, such as RUN/people.txt of `faces train`."),
]
Landmarks = Annotated[
    str | Path | None,
    file_flag(
        "Five points of each face (.csv or .json) to align faces by, as in training. Paths in FILE are relative to"
        " DATA, or else to the folder of FILE."
    ),
]
Images = Annotated[
    str | Path | Iterable[str | Path],
    argument(
        "Images of faces, folders of images, or quoted patterns such as 'photos/*.jpg'.",
        metavar="IMAGES",
        cli_type=tuple[str, ...],
    ),
]


@command
def train(
    data: DataOnDisk,
    *,
    model: Annotated[str | None, flag("Name of a new model, such as FaceViT-Ti.", metavar="NAME")] = None,
    source: Annotated[
        "str | Path | Bundle | None",
        flag("Start from this bundle instead of a new model.", metavar="BUNDLE", cli_name="from", cli_type=str),
    ] = None,
    people: Annotated[
        str | Path | None,
        file_flag(
            "File of names of the people to train on, one per line; all others are the test set. Default: random."
        ),
    ] = None,
    test: Annotated[float, flag("Share of the people in the random test set.", metavar="X")] = 0.2,
    landmarks: Annotated[
        str | Path | None,
        file_flag("Five points of each face (.csv or .json), to align faces to 112 px."),
    ] = None,
    resolution: Annotated[int | None, flag("Input size; default: as in the model.", metavar="R")] = None,
    recipe: Annotated[
        str | Path | Recipe,
        flag("A recipe of the package, or a .toml file.", metavar="R", cli_type=str, python="Or a `Recipe`."),
    ] = "faces",
    **options: Unpack[RunKeywords],
) -> "Result":
    """Train an embedding of faces.

    DATA has one folder per person. The split is by people: nobody in the training set is in the test set. The share
    `holdout` of the people in the training set is held out to measure progress during training. Safe to interrupt:
    --resume auto continues.

        >>> result = vitrail.faces.train("people", model="ViT-Pico/2", steps=2, batch=8, output="run")
        >>> result.bundle.model.config.embedding, (result.folder / "people.txt").exists()
        (512, True)
    """
    start = prepare_run(find_any_recipe(recipe), options)
    if model is not None:
        zoo.find(model)
    if isinstance(source, str | Path):
        check_folder(source)
    from vitrail.faces.face_training import train_faces
    from vitrail.reports.run_report import RunReport

    with start.folder() as folder:
        return start.finish(
            train_faces(
                start.correct(data),
                folder,
                start.recipe,
                start.options,
                model=model,
                source=source,
                people=people,
                test=test,
                landmarks=landmarks,
                resolution=resolution,
                observers=(RunReport,),
                **start.keywords,
            )
        )


@command
def evaluate(
    bundle: BundleOnDisk,
    data: DataOnDisk,
    *,
    pairs: Annotated[
        str | Path | None, file_flag("File of pairs to use, in the format of LFW; default: all pairs.")
    ] = None,
    groups: Annotated[
        str | Path | None, file_flag("A .csv file of person,group: also measure the error rates of each group.")
    ] = None,
    without: Without = None,
    landmarks: Landmarks = None,
    split: Split = None,
    seed: Annotated[int, flag("Random seed of folds, unknown people and intervals.", metavar="S")] = 0,
    output: Annotated[str | Path | None, folder_flag("Also write a report page to this folder.")] = None,
    show_images: Annotated[bool, flag("Show the images of the worst pairs on the report page.")] = False,
    force: Annotated[bool, flag("Overwrite DIR if vitrail wrote it.")] = False,
    device: Device = None,
    command: RecordedCommand = "",
) -> Report:
    """Measure how well a bundle tells people apart.

    Prints the error rates of verification, identification and open-set identification, with 95 % intervals. The classes
    of DATA are people, who should not be in the bundle's training set.

        >>> report = vitrail.faces.evaluate("fashion", "people")
        >>> report["people"], 0 <= report["eer"] <= 1
        (4, True)
    """
    check_integer("seed", seed, low=0, high=2**63 - 1)
    if show_images and output is None:
        raise UsageError("--show-images must be used with --output DIR: only the report page shows images.")
    if output is not None:
        check_output(Path(output), force=force)
    check_folder(bundle)
    from vitrail.faces.recognition import evaluate as run

    _say_training_notes(bundle, landmarks, data, without)
    paths = {"pairs": pairs, "groups": groups, "without": without, "landmarks": landmarks}
    evaluation = run(str(bundle), str(data), split=split, seed=seed, device=device, **_as_paths(paths))
    if output is not None:
        from vitrail.faces.evaluation_page import write_page

        write_page(evaluation, Path(output), shows_images=show_images, command=command, force=force)
    return Report(evaluation.report)


@command
def enroll(
    bundle: BundleOnDisk,
    gallery: Annotated[
        str | Path, argument("Gallery file; it is created if it does not exist.", metavar="GALLERY", cli_type=Path)
    ],
    name: Annotated[str, argument("Name of the person in the images.", metavar="NAME")],
    images: Images,
    *,
    landmarks: Landmarks = None,
    device: Device = None,
) -> Report:
    """Add images of a person to a gallery.

    Ask for the person's consent. The gallery stores embeddings and hashes, not the images. If an image cannot be read,
    none is added.

        >>> vitrail.faces.enroll("fashion", "people.gallery", "Ann", "people/Ann")["images"]
        3
    """
    if not isinstance(name, str):
        raise UsageError(f"Name must be a text, got {name!r}.")
    if is_file(name):
        raise UsageError(
            f"NAME must be the name of a person, got the file {name!r}. The arguments are BUNDLE GALLERY NAME IMAGES."
        )
    files = find_images(_as_strings(images))
    check_folder(bundle)
    from vitrail.faces.recognition import enroll as run

    _say_training_notes(bundle, landmarks)
    paths = _as_paths({"landmarks": landmarks})
    return Report(run(str(bundle), Path(gallery), name, files, **paths, device=device))


@command
def remove(
    gallery: GalleryPath, name: Annotated[str, argument("Name of the person to remove.", metavar="NAME")]
) -> Report:
    """Remove a person and all their data from a gallery.

    The data is also erased from the journal of the gallery. If another program reads the gallery for more than five
    seconds, or the disk has no space for a second copy of it, the exit code is 1 and traces may remain: run the command
    again.

        >>> enrolled = vitrail.faces.enroll("fashion", "people.gallery", "Ann", "people/Ann")
        >>> vitrail.faces.remove("people.gallery", "Ann")["people"]
        0
    """
    from vitrail.faces.gallery import Gallery

    with Gallery.open(Path(gallery)) as opened:
        is_removed = opened.remove(name)
        people = len(opened.people())
    return Report(gallery=str(gallery), name=name, removed=is_removed, people=people)


@command
def verify(
    bundle: BundleOnDisk,
    one: Annotated[str | Path, argument("An image of a face.", metavar="A", cli_type=str)],
    other: Annotated[str | Path, argument("Another image of a face.", metavar="B", cli_type=str)],
    *,
    gallery: Annotated[
        str | Path | None,
        flag("Use the threshold of this gallery, set by `faces calibrate`.", metavar="GALLERY", cli_type=Path),
    ] = None,
    landmarks: Landmarks = None,
    device: Device = None,
) -> Report:
    """Decide whether two images show the same person.

    Without a calibrated threshold, only a score is printed.

    >>> report = vitrail.faces.verify("fashion", "people/Ann/0.png", "people/Ben/0.png")
    >>> -1 <= report["score"] <= 1, report["same"]
    (True, None)
    """
    check_folder(bundle)
    from vitrail.faces.recognition import verify as run

    _say_training_notes(bundle, landmarks)
    paths = _as_paths({"gallery": gallery, "landmarks": landmarks})
    return Report(run(str(bundle), str(one), str(other), **paths, device=device))


@command
def identify(
    bundle: BundleOnDisk,
    gallery: GalleryPath,
    images: Images,
    *,
    top_k: Annotated[int, flag("Number of best-matching people to show for each image.", metavar="K")] = 3,
    landmarks: Landmarks = None,
    device: Device = None,
    receiver: Annotated[
        Callable[[list[str]], Callable[[dict[str, Any]], object]] | None,
        python_only(
            "Function for a stream of results. It is called with the names of all images, and returns a function that"
            " is called with each row as soon as it is computed. The result then has only the images that could not be"
            " read."
        ),
    ] = None,
) -> Rows:
    """Identify the people in images by a gallery.

    Prints the most similar people, or "unknown" below the calibrated threshold. Without a threshold, only scores are
    printed.

        >>> enrolled = vitrail.faces.enroll("fashion", "people.gallery", "Ann", "people/Ann")
        >>> (row,) = vitrail.faces.identify("fashion", "people.gallery", "people/Ben/0.png")
        >>> row["candidates"][0]["name"], row["accepted"]
        ('Ann', None)
    """
    check_integer("top_k", top_k, low=1, high=1_000_000)
    files = find_images(_as_strings(images))
    check_folder(bundle)
    from vitrail.faces.recognition import identify as run

    rows = Rows()
    rows.total = len(files)
    receive = rows.append if receiver is None else receiver(files)
    _say_training_notes(bundle, landmarks)
    for row in run(
        str(bundle), Path(gallery), files, top_k=top_k, **_as_paths({"landmarks": landmarks}), device=device
    ):
        receive(row)
        if receiver is not None and "error" in row:
            rows.append(row)
    return rows


@command
def calibrate(
    bundle: BundleOnDisk,
    gallery: GalleryPath,
    data: DataOnDisk,
    *,
    far: Annotated[float, flag("Acceptable rate of false accepts, such as 0.01.", metavar="F")],
    task: Annotated[
        Literal["both", "verify", "identify"],
        flag(
            "Threshold to set: verify (do two images show the same person?), identify (is the person in the gallery?)"
            " or both."
        ),
    ] = "both",
    without: Without = None,
    landmarks: Landmarks = None,
    split: Split = None,
    device: Device = None,
) -> Report:
    """Set the thresholds of a gallery for a rate of false accepts.

    DATA has images of people who are not enrolled. For verify, F is the share of pairs of different people that are
    accepted as the same person. For identify, F is the share of images of unknown people that are accepted as a person
    in this gallery. It is an error if DATA is too small to measure F.

        >>> enrolled = vitrail.faces.enroll("fashion", "me.gallery", "Me", "people/Ann/0.png")
        >>> report = vitrail.faces.calibrate("fashion", "me.gallery", "strangers", far=0.5, task="verify")
        >>> same = vitrail.faces.verify("fashion", "people/Ben/0.png", "people/Ben/0.png", gallery="me.gallery")
        >>> report["verify"]["far"], same["same"]
        (0.5, True)
    """
    check_folder(bundle)
    from vitrail.faces.gallery import TASKS
    from vitrail.faces.recognition import calibrate as run

    tasks = TASKS if task == "both" else (task,)
    _say_training_notes(bundle, landmarks, data, without)
    paths = _as_paths({"without": without, "landmarks": landmarks})
    return Report(run(str(bundle), Path(gallery), str(data), far, tasks=tasks, device=device, split=split, **paths))


def _as_strings(images: str | Path | Iterable[str | Path]) -> list[str]:
    return [str(image) for image in ([images] if isinstance(images, str | Path) else images)]


def _as_paths(paths: dict[str, str | Path | None]) -> dict[str, Any]:
    return {name: None if path is None else Path(path) for name, path in paths.items()}


def _say_training_notes(
    bundle: str | Path, landmarks: str | Path | None, data: str | Path = "", without: str | Path | None = None
) -> None:
    """Print a note if faces are not aligned as in the bundle's training, or if DATA may be its training set."""
    from vitrail.bundles.metadata import read_bundle_info
    from vitrail.faces.align import BY_LANDMARKS, UNALIGNED

    provenance = read_bundle_info(bundle, weights=False).provenance
    faces = provenance.get("faces")
    if not isinstance(faces, dict):
        return
    if landmarks is None and faces.get("alignment") == BY_LANDMARKS:
        say("note: this bundle was trained on faces aligned by landmarks; use --landmarks here, too")
    if landmarks is not None and faces.get("alignment") == UNALIGNED:
        say("note: this bundle was trained on faces that were not aligned; do not use --landmarks")
    trained_on = str(provenance.get("data")).rpartition(":")[0]
    if data and without is None and Path(trained_on).name == Path(data).name:
        say(
            f"note: this bundle was trained on people of {trained_on!r}, whom it tells apart better than others;"
            " leave them out with --without RUN/people.txt"
        )
