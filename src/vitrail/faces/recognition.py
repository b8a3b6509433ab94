"""What the commands of `vitrail faces` do, as functions."""

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
from vitrail.faces.embed import Aligner, Embedder, Face
from vitrail.faces.gallery import TASKS, Gallery, Index, composed, plain_name
from vitrail.faces.pairs import read_pairs
from vitrail.faces.people import merge_spellings, read_people
from vitrail.faces.thresholds import Calibration, check_rate, clopper_pearson, threshold_at


class Faces(NamedTuple):
    """Images of people."""

    data: str
    """Where they come from."""
    split: str
    images: Sequence[Face] | np.ndarray
    names: tuple[str, ...]
    """What messages call each image."""
    people: tuple[str, ...]
    """Everybody who has an image."""
    person_of: np.ndarray
    """Index of the person in each image (N)."""
    root: str
    """Folder of the files."""


def open_faces(data: str, split: str | None = None, without: Path | None = None) -> Faces:
    """The images of a data set whose classes are people: those of its test split, or val, or all; without the people
    that a file names, one a line."""
    dataset = open_data(data)
    dataset.check_one_label("Faces")
    dataset, chosen = merge_spellings(dataset, dataset.for_evaluation(split))
    if without is not None:
        left_out = [dataset.labels.index(name) for name in read_people(without, dataset.labels)]
        chosen = chosen.select(np.flatnonzero(~np.isin(chosen.labels, left_out)))
        if not len(chosen):
            raise UsageError(f"People must be left over, got everybody of {data!r} in {str(without)!r}.")
    known, person_of = np.unique(chosen.labels, return_inverse=True)
    names = tuple(chosen.image_name(index) for index in range(len(chosen)))
    people = tuple(dataset.labels[index] for index in known)
    return Faces(data, chosen.name, chosen.images, names, people, person_of, dataset.root)


def _aligner(landmarks: Path | None, *roots: str) -> Aligner | None:
    return None if landmarks is None else Aligner(landmarks, filter(None, roots))


class FaceEvaluation(NamedTuple):
    """A report, and what its page shows besides."""

    report: dict[str, Any]
    found: Verification
    faces: Faces
    """The images that the pairs are of."""


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
    """Judge a bundle on all pairs of the images of DATA, or on those of a file `pairs`; by groups of people, if a file
    says who is in which."""
    faces, listed = open_faces(data, split, without), None
    group_of = None if groups is None else _read_groups(groups, faces.people)
    if pairs is not None:
        if isinstance(faces.images, np.ndarray):
            raise UsageError(f"Pairs must come with data in files, got {data!r}.")
        files = {name: [] for name in faces.people}
        for name, person in zip(faces.names, faces.person_of, strict=True):
            files[faces.people[person]].append(name)
        listed = read_pairs(pairs, files)
        people, person_of = np.unique(listed.people, return_inverse=True)
        faces = faces._replace(
            images=listed.files, names=listed.files, people=tuple(map(str, people)), person_of=person_of
        )
    embedder = Embedder(bundle, device=device, aligner=_aligner(landmarks, faces.root))
    vectors, sources = embedder.embed(faces.images, meter=Meter(len(faces.images), "images"))
    blocks: PairBlocks = partial(verification_metrics.score_all_pairs, vectors)
    if listed is not None:
        blocks = partial(verification_metrics.score_listed_pairs, vectors, listed.one, listed.other)
    found = verification_metrics.verify_pairs(blocks, faces.person_of, seed=seed)
    report: dict[str, Any] = {
        "bundle": bundle,
        "model": embedder.key,
        "data": data,
        "split": faces.split,
        "pairs": None if pairs is None else str(pairs),
        "images": len(faces.images),
        "people": len(faces.people),
        "seed": seed,
        **found.report(),
    }
    if listed is None:
        report |= verification_metrics.cross_validate_people(vectors, faces.person_of, seed=seed) or {"accuracy": None}
        report |= identification_metrics.measure_identification(vectors, faces.person_of, seed=seed)
    else:
        report |= _listed_accuracy(blocks, faces.person_of, listed.folds) if listed.folds[-1] else {"accuracy": None}
        report |= {"rank1": None, "dir": []}
    report["notes"] = _notes(report)
    if both := _under_two_names(faces, sources):
        report["notes"].append(
            f"the same image has two names: {both[0]!r} and {both[1]!r}; `vitrail doctor` lists all of them"
        )
    if group_of is not None:
        named = [group_of.get(name) for name in faces.people]
        report["groups"] = verification_metrics.verify_groups(blocks, faces.person_of, named, found, seed=seed)
        if missing := sum(group is None for group in named):
            report["notes"].append(f"{missing:,} of {len(named):,} people are in no group of {str(groups)!r}")
    report["worst"] = {
        kind: [
            {"one": faces.names[one], "other": faces.names[other], "score": float(score)}
            for one, other, score in zip(*block, strict=True)
        ]
        for kind, block in zip(("genuine", "impostor"), found.worst, strict=True)
    }
    return FaceEvaluation(report, found, faces)


def _listed_accuracy(blocks: PairBlocks, person_of: np.ndarray, folds: np.ndarray) -> dict[str, Any]:
    parts = [(block.scores, person_of[block.first] == person_of[block.second]) for block in blocks()]
    scores, truth = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return verification_metrics.fold_accuracy(scores, truth, folds)


def _under_two_names(faces: Faces, sources: Sequence[str]) -> tuple[str, str] | None:
    """An image that is there again as somebody else, and that other one."""
    first: dict[str, int] = {}
    for at, source in enumerate(sources):
        if faces.person_of[first.setdefault(source, at)] != faces.person_of[at]:
            return faces.names[first[source]], faces.names[at]
    return None


def _notes(report: dict[str, Any]) -> list[str]:
    notes = []
    if report["eer"] == 0:
        notes.append(
            f"no error is seen, which does not tell how rare errors are: these are {report['people']:,} people"
        )
    if lacking := [row["far"] for row in report["tar"] if row["tar"] is None]:
        needed = verification_metrics.SUPPORT / max(lacking)
        notes.append(
            f"TAR at FAR {max(lacking):g} and below is not measured: it takes {needed:,.0f} impostor pairs, and there"
            f" are {report['impostor']:,}"
        )
    return notes


def _read_groups(path: Path, people: Sequence[str]) -> dict[str, str]:
    """The group of each person, from lines of `person,group`."""
    try:
        rows = list(csv.reader(io.StringIO(read_small_file(path).decode("utf-8-sig")), strict=True))
    except FileNotFoundError:
        raise UsageError(f"Groups must be a .csv file that exists, got {str(path)!r}.") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorruptFileError(path=path, cause=f"cannot be read as CSV ({reason})") from None
    found: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and cells == ["person", "group"]):
            continue
        if len(cells) != 2 or not all(cells):
            raise CorruptFileError(
                f"Line {number} of {str(path)!r} must be person,group, got {','.join(row)!r}.", path=path
            )
        if found.setdefault(composed(cells[0]), cells[1]) != cells[1]:
            raise CorruptFileError(
                f"Line {number} of {str(path)!r} must not put {cells[0]!r} into a second group.", path=path
            )
    if not found.keys() & set(people):
        raise UsageError(f"Groups must name people of the data, such as {people[0]!r}, got none in {str(path)!r}.")
    return found


def enroll(
    bundle: str,
    gallery: Path,
    name: str,
    files: Sequence[str],
    *,
    landmarks: Path | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Add images of a person to a gallery, which is made if it does not exist. Nothing is written if one image cannot
    be read."""
    name, embedder = plain_name(name), Embedder(bundle, device=device, aligner=_aligner(landmarks))
    Gallery.check(gallery, model=embedder.key, bundle=bundle)
    found = embedder.embed(files)
    with Gallery.open(gallery, model=embedder.key, bundle=bundle, width=found.vectors.shape[1]) as opened:
        had_threshold = opened.calibration("identify") is not None
        new = opened.enroll(name, found.vectors, found.sources)
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
    one: str,
    other: str,
    *,
    gallery: Path | None = None,
    landmarks: Path | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """The score of two images and, with a gallery that has a threshold for it, whether they show one person."""
    embedder = Embedder(bundle, device=device, aligner=_aligner(landmarks))
    known = None
    if gallery is not None:
        with Gallery.open(gallery, model=embedder.key, bundle=bundle) as opened:
            known = opened.calibration("verify")
    vectors = embedder.embed([one, other]).vectors
    score = float(vectors[0] @ vectors[1])
    accepted = None if known is None else score >= known.threshold
    return {"one": one, "other": other, "score": score, "same": accepted, **_stated(known)}


def identify(
    bundle: str,
    gallery: Path,
    files: Sequence[str],
    *,
    top_k: int = 5,
    landmarks: Path | None = None,
    device: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield for each image who it shows: the most alike people of the gallery and, if it has a threshold for it, the
    name or None for somebody unknown; or the error that prevented it."""
    embedder = Embedder(bundle, device=device, aligner=_aligner(landmarks))
    with Gallery.open(gallery, model=embedder.key, bundle=bundle) as opened, opened.reading():
        index, known = opened.index(), opened.calibration("identify")
    if not index.names:
        raise UsageError(f"Gallery must have people, got nobody in {str(gallery)!r}. `vitrail faces enroll` adds them.")
    for file, one in zip(files, embedder.stream(files), strict=True):
        if isinstance(one, VitrailError):
            yield {"file": file, "error": str(one)}
            continue
        _check_width(gallery, index, one.vector)
        best = index.search(one.vector, top_k)
        accepted = None if known is None else best[0].score >= known.threshold
        candidates = [match._asdict() for match in best]
        name = best[0].name if accepted else None
        yield {"file": file, "name": name, "accepted": accepted, "candidates": candidates, **_stated(known)}


def _check_width(gallery: Path, index: Index, vectors: np.ndarray) -> None:
    stored, width = index.templates_PD.shape[1], vectors.shape[-1]
    if stored != width:
        cause = f"is damaged: its embeddings have {stored} numbers, those of its model {width}"
        raise CorruptFileError(path=gallery, cause=cause)


def _stated(known: Calibration | None) -> dict[str, Any]:
    if known is None:
        return {"threshold": None}
    return {"threshold": known.threshold, "far": known.far, "far_interval": list(known.interval)}


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
    """Set the thresholds of a gallery for a demanded rate of errors, from images of other people than those enrolled:
    for `verify`, the share of their impostor pairs that is accepted; for `identify`, the share of their images that
    gets a name, which depends on how many people are enrolled."""
    faces = open_faces(data, split, without)
    embedder = Embedder(bundle, device=device, aligner=_aligner(landmarks, faces.root))
    with Gallery.open(gallery, model=embedder.key, bundle=bundle) as opened:
        changes = opened.changes
        enrolled, sources, index = opened.people(), opened.sources(), opened.index()
        if known := [name for name in faces.people if name in enrolled]:
            raise UsageError(
                f"DATA must be of other people than those enrolled, got {known[0]!r}, who is in the gallery."
            )
        if "identify" in tasks and not enrolled:
            raise UsageError(f"Gallery must have people to identify, got nobody in {str(gallery)!r}.")
        counts = np.bincount(faces.person_of)
        genuine = int((counts * (counts - 1) // 2).sum())
        trials = {"verify": len(faces.images) * (len(faces.images) - 1) // 2 - genuine, "identify": len(faces.images)}
        for task, unit in (("verify", "impostor pairs"), ("identify", "images of people who are not enrolled")):
            if task in tasks:
                check_rate(far, trials[task], task, unit)
        embedded = embedder.embed(faces.images, meter=Meter(len(faces.images), "images"))
        _check_width(gallery, index, embedded.vectors)
        for file, source in zip(faces.names, embedded.sources, strict=True):
            if source in sources:
                raise UsageError(
                    f"DATA must be of other images than those enrolled, got {file!r} of {sources[source]!r}."
                )
        if both := _under_two_names(faces, embedded.sources):
            raise UsageError(f"DATA must have an image under one name, got the same in {both[0]!r} and {both[1]!r}.")
        scores: dict[str, Callable[[], Iterator[np.ndarray]]] = {
            "verify": lambda: _pair_scores(embedded.vectors, faces.person_of, genuine=False),
            "identify": lambda: _best_scores(embedded.vectors, index),
        }
        found = {}
        for task in tasks:
            threshold, errors = threshold_at(far, scores[task](), trials[task])
            found[task] = Calibration(
                far=far,
                threshold=threshold,
                errors=errors,
                trials=trials[task],
                interval=clopper_pearson(errors, trials[task]),
                people=len(faces.people),
                data=data,
                gallery_people=len(enrolled) if task == "identify" else None,
                tar=_accepted(embedded.vectors, faces.person_of, threshold, genuine) if task == "verify" else None,
            )
        opened.calibrate(found, changes)
    return {"gallery": str(gallery), "model": embedder.key, **{task: one.to_json() for task, one in found.items()}}


def _pair_scores(vectors: np.ndarray, people: np.ndarray, *, genuine: bool) -> Iterator[np.ndarray]:
    for block in verification_metrics.score_all_pairs(vectors):
        yield block.scores[(people[block.first] == people[block.second]) == genuine]


def _best_scores(vectors: np.ndarray, index: Index) -> Iterator[np.ndarray]:
    rows = max(2**22 // len(index.names), 1)
    for start in range(0, len(vectors), rows):
        yield index.scores(vectors[start : start + rows]).max(axis=1)


def _accepted(vectors: np.ndarray, people: np.ndarray, threshold: float, genuine: int) -> float | None:
    """The share of genuine pairs above a threshold; None if there are none."""
    if not genuine:
        return None
    every = _pair_scores(vectors, people, genuine=True)
    return sum(int((scores.astype(np.float64) >= threshold).sum()) for scores in every) / genuine
