"""The commands of `vitrail faces`, except `train` and `remove`, as functions that return data."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.core.errors import CorruptFileError, UsageError, VitrailError
from vitrail.core.files import read_small_file
from vitrail.core.terminal import Meter
from vitrail.data.sources.registry import open_data
from vitrail.evaluation import identification_metrics, verification_metrics
from vitrail.evaluation.verification_metrics import PairBlocks, Verification
from vitrail.faces.embed import Aligner, Embedder, FaceImage
from vitrail.faces.gallery import TASKS, Gallery, Index, composed, plain_name
from vitrail.faces.pairs import read_pairs
from vitrail.faces.people import merge_spellings, read_people
from vitrail.faces.thresholds import Calibration, check_rate, clopper_pearson, threshold_at


class Faces(NamedTuple):
    """Face images with the person in each image."""

    data: str
    """Path or name of the data set."""
    split: str
    images: Sequence[FaceImage] | np.ndarray
    names: tuple[str, ...]
    """Name of each image in messages and reports."""
    people: tuple[str, ...]
    """Names of the people in the images."""
    person_of: np.ndarray
    """Index in `people` of the person in each image (N)."""
    root: str
    """Folder that contains the image files."""


def open_faces(data: str, split: str | None = None, without: Path | None = None) -> Faces:
    """Open a data set whose classes are people, for evaluation or calibration.

    Without `split`, the images of the test split are used, or of val, or all. `without` is a text file with the names
    of people to leave out, one per line.
    """
    dataset = open_data(data)
    dataset.check_one_label("Faces")
    dataset, images = merge_spellings(dataset, dataset.for_evaluation(split))
    if without is not None:
        excluded = [dataset.labels.index(name) for name in read_people(without, dataset.labels)]
        images = images.select(np.flatnonzero(~np.isin(images.labels, excluded)))
        if not len(images):
            raise UsageError(f"--without must not name everybody, got all people of {data!r} in {str(without)!r}.")
    labels, person_of = np.unique(images.labels, return_inverse=True)
    names = tuple(images.image_name(index) for index in range(len(images)))
    people = tuple(dataset.labels[label] for label in labels)
    return Faces(data, images.name, images.images, names, people, person_of, dataset.root)


def _open_aligner(landmarks: Path | None, *roots: str) -> Aligner | None:
    return None if landmarks is None else Aligner(landmarks, filter(None, roots))


class FaceEvaluation(NamedTuple):
    """Result of `vitrail faces evaluate`."""

    report: dict[str, Any]
    """Error rates as JSON."""
    verification: Verification
    """Curve, histograms and worst pairs, for the page."""
    faces: Faces
    """The evaluated images."""


def evaluate(
    bundle: str,
    data: str,
    *,
    split: str | None = None,
    pairs: Path | None = None,
    groups: Path | None = None,
    without: Path | None = None,
    landmarks: Path | None = None,
    seed: int = 0,
    device: str | None = None,
) -> FaceEvaluation:
    """Measure the error rates of a bundle on all pairs of images of DATA, or on the pairs listed in the file `pairs`.

    With `groups`, a CSV file of person,group, error rates are also reported for each group of people.
    """
    faces, listed = open_faces(data, split, without), None
    group_of = None if groups is None else _read_groups(groups, faces.people)
    if pairs is not None:
        if isinstance(faces.images, np.ndarray):
            raise UsageError(f"Pairs must be used with data in files, got {data!r}.")
        files = {name: [] for name in faces.people}
        for name, person in zip(faces.names, faces.person_of, strict=True):
            files[faces.people[person]].append(name)
        listed = read_pairs(pairs, files)
        people, person_of = np.unique(listed.people, return_inverse=True)
        faces = faces._replace(
            images=listed.files, names=listed.files, people=tuple(map(str, people)), person_of=person_of
        )
    embedder = Embedder(bundle, device=device, aligner=_open_aligner(landmarks, faces.root))
    vectors, sources = embedder.embed(faces.images, meter=Meter(len(faces.images), "images"))
    blocks: PairBlocks = partial(verification_metrics.score_all_pairs, vectors)
    if listed is not None:
        blocks = partial(verification_metrics.score_listed_pairs, vectors, listed.first, listed.second)
    verification = verification_metrics.verify_pairs(blocks, faces.person_of, seed=seed)
    report: dict[str, Any] = {
        "bundle": bundle,
        "model": embedder.key,
        "data": data,
        "split": faces.split,
        "pairs": None if pairs is None else str(pairs),
        "images": len(faces.images),
        "people": len(faces.people),
        "seed": seed,
        **verification.report(),
    }
    if listed is None:
        report |= verification_metrics.cross_validate_people(vectors, faces.person_of, seed=seed) or {"accuracy": None}
        report |= identification_metrics.measure_identification(vectors, faces.person_of, seed=seed)
    else:
        has_folds = listed.folds[-1] > 0
        report |= _fold_accuracy(blocks, faces.person_of, listed.folds) if has_folds else {"accuracy": None}
        report |= {"rank1": None, "dir": []}
    report["notes"] = _describe_limits(report)
    if duplicates := _find_image_of_two_people(faces, sources):
        report["notes"].append(
            f"the same image has two names: {duplicates[0]!r} and {duplicates[1]!r}; `vitrail doctor` lists all of them"
        )
    if group_of is not None:
        group_names = [group_of.get(name) for name in faces.people]
        report["groups"] = verification_metrics.verify_groups(
            blocks, faces.person_of, group_names, verification, seed=seed
        )
        if missing := sum(group is None for group in group_names):
            report["notes"].append(f"{missing:,} of {len(group_names):,} people are in no group of {str(groups)!r}")
    report["worst"] = {
        kind: [
            {"one": faces.names[first], "other": faces.names[second], "score": float(score)}
            for first, second, score in zip(*block, strict=True)
        ]
        for kind, block in zip(("genuine", "impostor"), verification.worst, strict=True)
    }
    return FaceEvaluation(report, verification, faces)


def _fold_accuracy(blocks: PairBlocks, person_of: np.ndarray, folds: np.ndarray) -> dict[str, Any]:
    """Return the accuracy of listed pairs over the folds of the list, as JSON."""
    parts = [(block.scores, person_of[block.first] == person_of[block.second]) for block in blocks()]
    scores, is_genuine = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return verification_metrics.fold_accuracy(scores, is_genuine, folds)


def _find_image_of_two_people(faces: Faces, sources: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of two equal images that are labelled as different people; None if there are none.

    `sources` holds the hash of each image.
    """
    first_index: dict[str, int] = {}
    for index, source in enumerate(sources):
        if faces.person_of[first_index.setdefault(source, index)] != faces.person_of[index]:
            return faces.names[first_index[source]], faces.names[index]
    return None


def _describe_limits(report: dict[str, Any]) -> list[str]:
    """Return notes about error rates that the data of an evaluation are too few to measure."""
    notes = []
    if report["eer"] == 0:
        notes.append(f"no errors among {report['people']:,} people: too few people to measure how rare errors are")
    if unmeasured := [row["far"] for row in report["tar"] if row["tar"] is None]:
        min_pairs = verification_metrics.SUPPORT / max(unmeasured)
        notes.append(
            f"TAR at FAR {max(unmeasured):g} and below is not measured: it needs {min_pairs:,.0f} impostor pairs, got"
            f" {report['impostor']:,}"
        )
    return notes


def _read_groups(path: Path, people: Sequence[str]) -> dict[str, str]:
    """Read the group of each person from a CSV file of person,group. Raises UsageError if no person is in `people`."""
    try:
        rows = list(csv.reader(io.StringIO(read_small_file(path).decode("utf-8-sig")), strict=True))
    except FileNotFoundError:
        raise UsageError(f"Groups must be a .csv file that exists, got {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorruptFileError(path=path, cause=f"cannot be read as CSV ({reason})") from None
    group_of: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and cells == ["person", "group"]):
            continue
        if len(cells) != 2 or not all(cells):
            raise CorruptFileError(
                f"Line {number} of {str(path)!r} must be person,group, got {','.join(row)!r}.", path=path
            )
        if group_of.setdefault(composed(cells[0]), cells[1]) != cells[1]:
            raise CorruptFileError(
                f"Line {number} of {str(path)!r} must not put {cells[0]!r} into a second group.", path=path
            )
    if not group_of.keys() & set(people):
        raise UsageError(f"Groups must name people of the data, such as {people[0]!r}, got none in {str(path)!r}.")
    return group_of


def enroll(
    bundle: str,
    gallery: Path,
    name: str,
    files: Sequence[str],
    *,
    landmarks: Path | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Add images of a person to a gallery, which is created if it does not exist. Return counts as JSON.

    Nothing is written if an image cannot be read.
    """
    name, embedder = plain_name(name), Embedder(bundle, device=device, aligner=_open_aligner(landmarks))
    Gallery.check(gallery, model=embedder.key, bundle=bundle)
    embeddings = embedder.embed(files)
    with Gallery.open(gallery, model=embedder.key, bundle=bundle, width=embeddings.vectors.shape[1]) as opened:
        had_threshold = opened.calibration("identify") is not None
        new = opened.enroll(name, embeddings.vectors, embeddings.sources)
        people = opened.people()
        is_dropped = had_threshold and opened.calibration("identify") is None
    return {
        "gallery": str(gallery),
        "name": name,
        "new": new,
        "images": people[name],
        "people": len(people),
        "threshold_dropped": is_dropped,
    }


def verify(
    bundle: str,
    first: str,
    second: str,
    *,
    gallery: Path | None = None,
    landmarks: Path | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Return the score of two images as JSON and, if the gallery has a threshold, whether they show the same person."""
    embedder = Embedder(bundle, device=device, aligner=_open_aligner(landmarks))
    calibration = None
    if gallery is not None:
        with Gallery.open(gallery, model=embedder.key, bundle=bundle) as opened:
            calibration = opened.calibration("verify")
    vectors = embedder.embed([first, second]).vectors
    score = float(vectors[0] @ vectors[1])
    is_same = None if calibration is None else score >= calibration.threshold
    return {"one": first, "other": second, "score": score, "same": is_same, **_threshold_to_json(calibration)}


def identify(
    bundle: str,
    gallery: Path,
    files: Sequence[str],
    *,
    top_k: int = 5,
    landmarks: Path | None = None,
    device: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield for each image, as JSON, the people of the gallery with the highest scores, or the error.

    If the gallery has a threshold, `name` is the person whose score reaches it, or None for an unknown person.
    """
    embedder = Embedder(bundle, device=device, aligner=_open_aligner(landmarks))
    with Gallery.open(gallery, model=embedder.key, bundle=bundle) as opened, opened.reading():
        index, calibration = opened.index(), opened.calibration("identify")
    if not index.names:
        raise UsageError(f"Gallery must have people, got nobody in {str(gallery)!r}. `vitrail faces enroll` adds them.")
    for file, embedding in zip(files, embedder.stream(files), strict=True):
        if isinstance(embedding, VitrailError):
            yield {"file": file, "error": str(embedding)}
            continue
        _check_embedding_width(gallery, index, embedding.vector)
        matches = index.search(embedding.vector, top_k)
        accepted = None if calibration is None else matches[0].score >= calibration.threshold
        yield {
            "file": file,
            "name": matches[0].name if accepted else None,
            "accepted": accepted,
            "candidates": [match._asdict() for match in matches],
            **_threshold_to_json(calibration),
        }


def _check_embedding_width(gallery: Path, index: Index, vectors: np.ndarray) -> None:
    stored, width = index.templates_PD.shape[1], vectors.shape[-1]
    if stored != width:
        cause = f"is damaged: its embeddings have {stored} numbers, those of its model {width}"
        raise CorruptFileError(path=gallery, cause=cause)


def _threshold_to_json(calibration: Calibration | None) -> dict[str, Any]:
    if calibration is None:
        return {"threshold": None}
    return {"threshold": calibration.threshold, "far": calibration.far, "far_interval": list(calibration.interval)}


def calibrate(
    bundle: str,
    gallery: Path,
    data: str,
    far: float,
    *,
    tasks: Sequence[str] = TASKS,
    split: str | None = None,
    without: Path | None = None,
    landmarks: Path | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Set the thresholds of a gallery for a false-accept rate, on images of people who are not enrolled.

    For `verify`, the rate is the share of impostor pairs that are accepted. For `identify`, it is the share of images
    that get a name; it depends on the number of enrolled people. Return the calibrations as JSON.
    """
    faces = open_faces(data, split, without)
    embedder = Embedder(bundle, device=device, aligner=_open_aligner(landmarks, faces.root))
    with Gallery.open(gallery, model=embedder.key, bundle=bundle) as opened:
        changes = opened.changes
        enrolled, sources, index = opened.people(), opened.sources(), opened.index()
        if overlap := [name for name in faces.people if name in enrolled]:
            raise UsageError(
                f"DATA must be of people who are not enrolled, got {overlap[0]!r}, who is in the gallery. Leave"
                " enrolled people out by --without FILE."
            )
        if "identify" in tasks and not enrolled:
            raise UsageError(f"Gallery must have people to identify, got nobody in {str(gallery)!r}.")
        counts = np.bincount(faces.person_of)
        genuine = int((counts * (counts - 1) // 2).sum())
        trials = {"verify": len(faces.images) * (len(faces.images) - 1) // 2 - genuine, "identify": len(faces.images)}
        for task, unit in (("verify", "impostor pairs"), ("identify", "images of people who are not enrolled")):
            if task in tasks:
                check_rate(far, trials[task], task, unit)
        embeddings = embedder.embed(faces.images, meter=Meter(len(faces.images), "images"))
        _check_embedding_width(gallery, index, embeddings.vectors)
        for file, source in zip(faces.names, embeddings.sources, strict=True):
            if source in sources:
                raise UsageError(f"DATA must be of images that are not enrolled, got {file!r} of {sources[source]!r}.")
        if duplicates := _find_image_of_two_people(faces, embeddings.sources):
            raise UsageError(
                f"DATA must have each image of one person only, got the same image in {duplicates[0]!r} and"
                f" {duplicates[1]!r}."
            )
        scores: dict[str, Callable[[], Iterator[np.ndarray]]] = {
            "verify": lambda: _pair_scores(embeddings.vectors, faces.person_of, genuine=False),
            "identify": lambda: _highest_gallery_scores(embeddings.vectors, index),
        }
        calibrations = {}
        for task in tasks:
            threshold, errors = threshold_at(far, scores[task](), trials[task])
            is_identify = task == "identify"
            tar = None if is_identify else _true_accept_rate(embeddings.vectors, faces.person_of, threshold, genuine)
            calibrations[task] = Calibration(
                far=far,
                threshold=threshold,
                errors=errors,
                trials=trials[task],
                interval=clopper_pearson(errors, trials[task]),
                people=len(faces.people),
                data=data,
                gallery_people=len(enrolled) if is_identify else None,
                tar=tar,
            )
        opened.calibrate(calibrations, changes)
    documents = {task: calibration.to_json() for task, calibration in calibrations.items()}
    return {"gallery": str(gallery), "model": embedder.key, **documents}


def _pair_scores(vectors: np.ndarray, people: np.ndarray, *, genuine: bool) -> Iterator[np.ndarray]:
    """Yield the scores of all genuine pairs or of all impostor pairs, in blocks."""
    for block in verification_metrics.score_all_pairs(vectors):
        yield block.scores[(people[block.first] == people[block.second]) == genuine]


def _highest_gallery_scores(vectors: np.ndarray, index: Index) -> Iterator[np.ndarray]:
    """Yield the highest score of each image with any person of the gallery, in blocks."""
    rows = max(2**22 // len(index.names), 1)
    for start in range(0, len(vectors), rows):
        yield index.scores(vectors[start : start + rows]).max(axis=1)


def _true_accept_rate(vectors: np.ndarray, people: np.ndarray, threshold: float, genuine: int) -> float | None:
    """Return the share of the `genuine` pairs that a threshold accepts; None if there are no genuine pairs."""
    if not genuine:
        return None
    blocks = _pair_scores(vectors, people, genuine=True)
    return sum(int((scores.astype(np.float64) >= threshold).sum()) for scores in blocks) / genuine
