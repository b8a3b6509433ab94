"""`vitrail doctor`: problems of a data set that would stop or harm training."""

import dataclasses
import functools
import hashlib
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.data.augment.operations import to_image
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import StoredImage, identify, open_image, read_file, to_channels
from vitrail.data.image_files import SUFFIXES
from vitrail.data.prefetch import prefetch
from vitrail.data.sources.tree import Folder, Tree

IMBALANCE = 10  # the largest class over the smallest, from which a warning is due
_SAME_SIZE = 0.9  # share of images of one size from which other sizes are remarkable
_TINY = 8  # times smaller than the usual image

# Two images are near duplicates if their perceptual hashes (64 bits) differ in few bits and their thumbnails agree.
# Chosen on photos: of 396 re-encoded, halved, brightened or mirrored ones all are found; of 203,000 pairs of different
# photos none is, of 2.3 million pairs of aligned faces seven.
_HASH_BITS = 14
_AGREEMENT = 0.92  # correlation of thumbnails
_THUMBNAIL = 32
_MOST_TWINS = 64  # images, the nearest by hash, whose thumbnails are compared
_FEW_PAIRS, _MANY_ALIKE = 5, 0.05  # pairs to list in any case; share of images that look alike from which one line does
_SHOWN = 10  # lines for people under one headline
_LOOKED_AT = 64  # pixels of the shorter side below which all images look alike


class Finding(NamedTuple):
    """A problem that was found."""

    kind: str
    severity: Literal["error", "warning"]
    files: tuple[str, ...]
    message: str

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "files": list(self.files)}


@dataclasses.dataclass(frozen=True)
class _Seen:
    """Properties of a readable image."""

    name: str
    split: str
    label: int | tuple[int, ...]
    """Its class; of several labels, 1 for each that it has."""
    digest: bytes
    format: str
    mode: str
    size: tuple[int, int]
    thumbnail: np.ndarray | None


def find_problems(dataset: Dataset, *, people: bool = False, workers: int = 2) -> list[Finding]:
    """All findings, errors first. With `people`, classes are people, and those of one split must be strangers to the
    others."""
    classes = _people(dataset) if people else _classes(dataset)
    findings = [*classes, *_look_alikes(dataset), *_unlabelled(dataset), *_unused_files(dataset)]
    seen: list[_Seen] = []
    for split in dataset.splits.values():
        if (pixels := split.in_memory) is not None:
            seen += _look_at_memory(split, pixels)
        else:
            jobs = (
                functools.partial(_look, path, split.name, label)
                for path, label in zip(split.images, _hashable(split.labels), strict=True)
            )
            results = list(prefetch(jobs, workers, ahead=32))
            seen += [result for result in results if isinstance(result, _Seen)]
            findings += [result for result in results if isinstance(result, Finding)]
    findings += [*_duplicates(seen, people=people)]
    findings += [*_near_duplicates(seen, dataset.labels, people=people)]
    findings += [*_lying_endings(seen), *_modes(seen), *_sizes(seen)]
    return sorted(findings, key=lambda finding: finding.severity != "error")


def format_findings(findings: list[Finding], root: str) -> Iterator[list[str]]:
    """Findings as text, one paragraph for each severity and kind: a headline, then at most ten lines. Files are
    relative to `root`."""
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.severity, finding.kind].append(finding)
    for (severity, kind), group in groups.items():
        named = [[os.path.relpath(file, root) if root else file for file in finding.files] for finding in group]
        if len(group) == 1:
            headline, lines = group[0].message, named[0]
            if kind == "unreadable":  # its message is a sentence about the file
                headline, lines = f"{named[0][0]} {headline}", []
        else:
            headline = f"{len(group):,} findings"
            lines = [
                ": ".join(filter(None, [_some(files), finding.message]))
                for finding, files in zip(group, named, strict=True)
            ]
        rest = [f"... and {len(lines) - _SHOWN:,} more (all with --json)"] if len(lines) > _SHOWN else []
        yield [f"{severity}  {kind}: {headline}", *lines[:_SHOWN], *rest]


def _some(files: list[str]) -> str:
    return ", ".join(files[:3]) + (f" and {len(files) - 3:,} more" if len(files) > 3 else "")


def _classes(dataset: Dataset) -> Iterator[Finding]:
    counts = {name: dataset.counts(split) for name, split in dataset.splits.items()}
    reported = set()
    if len(dataset.labels) < 2:
        yield Finding("single-class", "error", (), f"there is only one class, {dataset.labels[0]!r}")
    for split, listed in dataset.folders.items():
        missing = dataset.missing(dataset.splits[split]) if split in dataset.splits else dataset.labels
        for label, folder in listed.items():
            if label in missing:
                reported.add(label)
                yield Finding("empty-class", "error", (folder,), f"class {label!r} has no image in {split}")
    for index, label in enumerate(dataset.labels):
        present = [split for split in counts if counts[split][index]]
        absent = [split for split in counts if not counts[split][index]]
        if absent and label not in reported:
            reported.add(label)
            where = f"is in {' and '.join(present)} but not in {' and '.join(absent)}" if present else "has no image"
            yield Finding("label-mismatch" if present else "empty-class", "error", (), f"class {label!r} {where}")
    name = "train" if "train" in counts else next(iter(counts))
    training = {label: int(count) for label, count in zip(dataset.labels, counts[name], strict=True)}
    for label, count in training.items():
        if count == 1 and label not in reported:
            reported.add(label)
            yield Finding("single-picture-class", "warning", (), f"class {label!r} has one image in {name}")
    rest = {label: count for label, count in training.items() if label not in reported}
    if rest and max(rest.values()) >= IMBALANCE * min(rest.values()):
        most, least = max(rest, key=rest.__getitem__), min(rest, key=rest.__getitem__)
        message = f"class {most!r} has {rest[most]:,} images in {name}, class {least!r} has {rest[least]:,}"
        yield Finding("imbalance", "warning", (), message)


def _people(dataset: Dataset) -> Iterator[Finding]:
    """People without an image, or with one alone. A person is in one split, so that nobody need be in all."""
    counts = np.sum([dataset.counts(split) for split in dataset.splits.values()], axis=0)
    for label, count in zip(dataset.labels, counts, strict=True):
        if count == 0:
            yield Finding("empty-class", "error", (), f"person {label!r} has no image")
        elif count == 1:
            message = f"person {label!r} has one image: no pair shows whether they are recognised"
            yield Finding("single-picture-class", "warning", (), message)


def _look_alikes(dataset: Dataset) -> Iterator[Finding]:
    """Classes that are probably meant as one: macOS writes composed letters (é, 가) in parts, others as one."""
    groups: dict[str, list[str]] = defaultdict(list)
    for label in dataset.labels:
        groups[" ".join(unicodedata.normalize("NFKC", label).casefold().split())].append(label)
    for labels in groups.values():
        if len(labels) > 1:
            named = ", ".join(map(ascii, labels))
            message = f"classes differ only in capitals, spaces or the encoding of letters: {named}"
            yield Finding("similar-classes", "warning", (), message)


def _unused_files(dataset: Dataset) -> Iterator[Finding]:
    """Unused files: images outside of class folders, and files without an image extension."""
    if not dataset.folders:
        return
    classes = tuple(folder + os.sep for listed in dataset.folders.values() for folder in listed.values())
    known = {path for split in dataset.splits.values() if split.in_memory is None for path in split.images}
    stores = (path.store for path in known if isinstance(path, StoredImage))
    tree = next((store for store in stores if isinstance(store, Tree)), Folder(dataset.root))
    strangers = []
    for place, names in tree.walk():
        is_class = (place + os.sep).startswith(classes)
        for name in names:
            is_image = name.rpartition(".")[2].lower() in SUFFIXES
            is_litter = name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini")
            path = os.path.join(place, name)  # noqa: PTH118
            if (is_image or is_class) and not is_litter and path not in known:
                strangers.append(path)
    if strangers:
        are = "file is" if len(strangers) == 1 else "files are"
        yield Finding("ignored-file", "warning", tuple(sorted(strangers)), f"{len(strangers):,} {are} not used")


def _hashable(labels: np.ndarray) -> list[Any]:
    return [tuple(row) for row in labels.tolist()] if labels.ndim == 2 else labels.tolist()


def _unlabelled(dataset: Dataset) -> Iterator[Finding]:
    """Images without any label, where images have several."""
    if not dataset.is_multilabel:
        return
    files = [
        split.image_name(index)
        for split in dataset.splits.values()
        for index in np.flatnonzero(~split.labels.any(axis=1))
    ]
    if files:
        have = "image has" if len(files) == 1 else "images have"
        yield Finding("unlabelled", "warning", tuple(files), f"{len(files):,} {have} no label")


def _look(path: str, split: str, label: int | tuple[int, ...]) -> _Seen | Finding:
    try:
        content = read_file(path)
        form, mode, size = identify(content, name=path)
        # A JPEG is decoded small: all of the file is read, so that a cut shows, but fewer pixels are computed.
        opened = open_image(content, lambda *_: (2 * _THUMBNAIL, 2 * _THUMBNAIL), name=path)
        image = to_channels(opened, 1, (255, 255, 255))
        is_large = min(size) >= _LOOKED_AT
        digest = hashlib.sha256(content if is_large else f"{opened.mode} {opened.size}".encode() + opened.tobytes())
    except CorruptFileError as error:
        return Finding("unreadable", "error", (path,), error.cause)
    except UsageError:  # there is no file to read
        return Finding("unreadable", "error", (path,), "is missing or not a file")
    except (OSError, ValueError) as error:
        return Finding("unreadable", "error", (path,), f"cannot be converted ({error})")
    return _Seen(path, split, label, digest.digest(), form, mode, size, _thumbnail(image) if is_large else None)


def _look_at_memory(split: Split, pixels: np.ndarray) -> Iterator[_Seen]:
    for index, image in enumerate(pixels):
        digest = hashlib.sha256(np.ascontiguousarray(image).data).digest()
        label, size, thumbnail = int(split.labels[index]), image.shape[1::-1], None
        if min(size) >= _LOOKED_AT and image.shape[2] in (1, 3):
            thumbnail = _thumbnail(to_image(image).convert("L"))
        yield _Seen(split.image_name(index), split.name, label, digest, "", "", size, thumbnail)


def _thumbnail(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)).astype(np.uint8)


def _duplicates(seen: list[_Seen], *, people: bool) -> Iterator[Finding]:
    """The same image in two classes, under two names, in two splits (which invalidates scores), or twice in one
    split. Two equal images of one person do no harm."""
    groups = defaultdict(list)
    for one in seen:
        groups[one.digest].append(one)
    for group in groups.values():
        splits = list(dict.fromkeys(one.split for one in group))
        names = tuple(one.name for one in group)
        if len({one.label for one in group}) > 1:
            message = "the same image under more than one name" if people else "the same image in more than one class"
            message += f", in {' and '.join(splits)}" if people and len(splits) > 1 else ""
            yield Finding("conflicting-labels", "warning", names, message)
        elif len(splits) > 1:
            yield Finding("duplicate", "warning", names, f"the same image in {' and '.join(splits)}")
        elif len(group) > 1 and not people:
            message = f"the same image {len(group)} times{_harm(splits[0])}"
            yield Finding("duplicate", "warning", names, message)


def _harm(split: str) -> str:
    """The harm of equal images of one class in a split."""
    return "; a split of this folder may put copies on both sides" if split == "all" else f" in {split}"


def _near_duplicates(seen: list[_Seen], labels: Sequence[str], *, people: bool) -> Iterator[Finding]:
    """Near-duplicates: re-encoded, resized, slightly brighter or mirrored images. Each image is compared with all that
    come before it; pairs with different labels come first, then those in two splits.

    If many images of one split look alike (drawings on white, aligned faces, frames of a film), one summary replaces
    hundreds of findings.
    """
    # Of equal images, the first of each split and label: the others are found as duplicates.
    distinct = {(one.digest, one.split, one.label): one for one in reversed(seen) if one.thumbnail is not None}
    images = [*reversed(distinct.values())]
    if len(images) < 2:
        return
    pairs, alike = [], 0
    order = {split: place for place, split in enumerate(dict.fromkeys(one.split for one in images))}
    for index, twins in enumerate(
        _find_twins(np.stack([one.thumbnail for one in images if one.thumbnail is not None]))
    ):
        later = images[index]
        earlier = [(images[other], is_mirrored) for other, is_mirrored in twins if images[other].digest != later.digest]
        alike += any(one.split == later.split for one, _ in earlier)
        if people:
            earlier = [pair for pair in earlier if (pair[0].label, pair[0].split) != (later.label, later.split)]
        if earlier:
            one, is_mirrored = min(earlier, key=lambda pair: _rank(pair[0], later))
            pairs.append((_rank(one, later), order[later.split], one, later, is_mirrored))
    pairs.sort(key=lambda pair: pair[:2])
    findings = [
        Finding("near-duplicate", "warning", (one.name, later.name), _describe_pair(one, later, labels, is_mirrored))
        for _, _, one, later, is_mirrored in pairs
    ]
    if len(findings) <= _FEW_PAIRS or alike <= _MANY_ALIKE * len(images):
        yield from findings
        return
    ranks = Counter(rank for rank, *_ in pairs)
    files = tuple(dict.fromkeys(name for finding in findings for name in finding.files))
    message = (
        f"{len(findings):,} of {len(images):,} images look like another one ({ranks[0]:,} with another label,"
        f" {ranks[1]:,} of another split): this may be the nature of the data"
    )
    yield Finding("near-duplicate", "warning", files, message)


def _rank(one: _Seen, other: _Seen) -> int:
    """How much two images that look alike matter: 0 with different labels, 1 in two splits, 2 otherwise."""
    return 0 if one.label != other.label else 1 if one.split != other.split else 2


def _describe_pair(one: _Seen, other: _Seen, labels: Sequence[str], is_mirrored: bool) -> str:
    message = f"what looks like the same image{' mirrored' if is_mirrored else ''}"
    if one.label != other.label:
        is_named = isinstance(one.label, int) and isinstance(other.label, int)
        named = f": {labels[one.label]!r} and {labels[other.label]!r}" if is_named else ""
        message += f" with different labels{named}"
    if one.split != other.split:
        return f"{message}{',' if one.label != other.label else ''} in {one.split} and {other.split}"
    return message if one.label != other.label else f"{message} twice{_harm(one.split)}"


def _find_twins(thumbnails: np.ndarray) -> Iterator[list[tuple[int, bool]]]:
    """For each image, the earlier images that are near-duplicates of it, and whether mirrored. Hashes are compared with
    all earlier ones (about a second for 20,000 images), thumbnails with the nearest by hash only."""
    hashes, mirrored = _perceptual_hash(thumbnails), _perceptual_hash(thumbnails[:, :, ::-1])
    patterns, half = _patterns(thumbnails), _THUMBNAIL // 2
    for index in range(len(thumbnails)):
        twins = []
        pattern = patterns[index]
        turned = pattern.reshape(half, half)[:, ::-1].reshape(-1)
        for candidates, own, is_mirrored in ((hashes, pattern, False), (mirrored, turned, True)):
            distances = np.bitwise_count(candidates[:index] ^ hashes[index])
            near = np.flatnonzero(distances <= _HASH_BITS)
            if len(near) > _MOST_TWINS:
                near = near[np.argsort(distances[near], kind="stable")[:_MOST_TWINS]]
            twins += [(other, is_mirrored) for other in near[patterns[near] @ own >= _AGREEMENT].tolist()]
        yield twins


def _perceptual_hash(thumbnails: np.ndarray) -> np.ndarray:
    """Perceptual hash of 64 bits per image: which of the 64 lowest cosine components, without the mean, exceed their
    median."""
    place = np.arange(_THUMBNAIL)
    cosines = np.cos(np.pi / _THUMBNAIL * (place[None, :] + 0.5) * np.arange(8)[:, None]).astype(np.float32)
    chunks = [
        cosines @ thumbnails[start : start + 4096].astype(np.float32) @ cosines.T
        for start in range(0, len(thumbnails), 4096)
    ]
    components = np.concatenate(chunks).reshape(len(thumbnails), 64)
    components[:, 0] = 0
    is_above = components > np.median(components, axis=1, keepdims=True)
    return np.packbits(is_above, axis=1).view(np.uint64)[:, 0]


def _patterns(thumbnails: np.ndarray) -> np.ndarray:
    """Thumbnails at half their size without mean and contrast, float32 (n, 256): the product of two is their
    correlation. Uniform ones are 0."""
    half = _THUMBNAIL // 2
    small = thumbnails.reshape(-1, half, 2, half, 2).mean(axis=(2, 4), dtype=np.float32).reshape(-1, half**2)
    small -= small.mean(axis=1, keepdims=True)
    length = np.linalg.norm(small, axis=1, keepdims=True)
    return np.where(length > half, small / np.maximum(length, half), 0)


def _lying_endings(seen: list[_Seen]) -> Iterator[Finding]:
    for one in seen:
        ending = one.name.rpartition(".")[2].lower()
        is_format = "JPEG" if one.format == "MPO" else one.format
        if is_format and ending in SUFFIXES and SUFFIXES[ending] != is_format:
            yield Finding("lying-extension", "warning", (one.name,), f"ends in .{ending} but is {is_format}")


def _modes(seen: list[_Seen]) -> Iterator[Finding]:
    counts = Counter(one.mode for one in seen if one.mode)
    for mode, count in counts.most_common()[1:]:
        names = tuple(one.name for one in seen if one.mode == mode)
        usual, most = counts.most_common(1)[0]
        are = "image is" if count == 1 else "images are"
        yield Finding("mixed-modes", "warning", names, f"{count:,} {are} {mode}, {most:,} are {usual}")


def _sizes(seen: list[_Seen]) -> Iterator[Finding]:
    """Images of another size if nearly all have the same, and very small images."""
    if not seen:
        return
    usual, most = Counter(one.size for one in seen).most_common(1)[0]
    middle = float(np.median([min(one.size) for one in seen]))
    if _SAME_SIZE * len(seen) <= most < len(seen):
        odd = [one for one in seen if one.size != usual]
        than = f"of another size than {usual[0]} x {usual[1]}"
    else:
        odd = [one for one in seen if _TINY * min(one.size) < middle]
        than = f"over {_TINY} times smaller than usual"
    if odd:
        are = "image is" if len(odd) == 1 else "images are"
        yield Finding("mixed-sizes", "warning", tuple(one.name for one in odd), f"{len(odd):,} {are} {than}")
