"""`vitrail doctor`: find the problems of a data set that would stop or harm training."""

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

IMBALANCE = 10  # ratio of the sizes of the largest and the smallest class from which a warning is reported
_COMMON_SIZE = 0.9  # share of images of the same size from which other sizes are reported
_TINY = 8  # an image is reported if it is this many times smaller than the median

# Two images are near-duplicates if their perceptual hashes (64 bits) differ in few bits and their thumbnails correlate.
# The limits were chosen on photos: all of 396 re-encoded, halved, brightened or mirrored photos are detected; false
# positives are none of 203,000 pairs of different photos, and seven of 2.3 million pairs of aligned faces.
_MAX_HASH_BITS = 14  # bits in which the hashes of near-duplicates may differ
_MIN_CORRELATION = 0.92  # of thumbnails
_THUMBNAIL = 32  # pixels
_MAX_CANDIDATES = 64  # images, the nearest by hash, whose thumbnails are compared
_LISTED_PAIRS = 5  # near-duplicates up to this number are always listed
_COMMON_TWINS = 0.05  # share of images that look alike within a split from which a summary replaces the list
_MAX_LINES = 10  # lines under a headline of the text output
_MIN_SIDE = 64  # pixels of the shorter side; smaller images are not searched for near-duplicates


class Finding(NamedTuple):
    """A problem of a data set, as `vitrail doctor --json` prints it."""

    kind: str
    severity: Literal["error", "warning"]
    files: tuple[str, ...]
    message: str

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "files": list(self.files)}


@dataclasses.dataclass(frozen=True)
class _ImageRecord:
    """Properties of a readable image."""

    name: str
    split: str
    label: int | tuple[int, ...]
    """Index of the class; or, if images have several labels, 1 for each label of the image and 0 for others."""
    digest: bytes
    """Hash that equal images share."""
    format: str
    mode: str
    size: tuple[int, int]
    """Width and height."""
    thumbnail: np.ndarray | None
    """Grey levels, uint8 (32, 32); None for an image that is too small to be compared."""


def find_problems(dataset: Dataset, *, people: bool = False, workers: int = 2) -> list[Finding]:
    """Read all images of a data set and return the findings, errors first.

    With `people`, classes are people, and a person may be missing from a split.
    """
    findings = [*(_check_people(dataset) if people else _check_classes(dataset))]
    findings += [*_find_similar_names(dataset), *_find_unlabelled(dataset), *_find_unused_files(dataset)]
    records: list[_ImageRecord] = []
    for split in dataset.splits.values():
        if (pixels := split.in_memory) is not None:
            records += _inspect_pixels(split, pixels)
        else:
            jobs = (
                functools.partial(_inspect_file, path, split.name, label)
                for path, label in zip(split.images, _as_hashable(split.labels), strict=True)
            )
            results = list(prefetch(jobs, workers, ahead=32))
            records += [result for result in results if isinstance(result, _ImageRecord)]
            findings += [result for result in results if isinstance(result, Finding)]
    findings += [*_find_duplicates(records, people=people)]
    findings += [*_find_near_duplicates(records, dataset.labels, people=people)]
    findings += [*_find_misleading_extensions(records), *_find_other_modes(records), *_find_other_sizes(records)]
    return sorted(findings, key=lambda finding: finding.severity != "error")


def format_findings(findings: list[Finding], root: str) -> Iterator[list[str]]:
    """Yield the lines of a paragraph for each severity and kind of findings: a headline and at most ten lines.

    Files are named relative to `root`.
    """
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.severity, finding.kind].append(finding)
    for (severity, kind), group in groups.items():
        names = [[os.path.relpath(file, root) if root else file for file in finding.files] for finding in group]
        if len(group) == 1:
            headline, lines = group[0].message, names[0]
            if kind == "unreadable":  # its message is a sentence about the file
                headline, lines = f"{names[0][0]} {headline}", []
        else:
            headline = f"{len(group):,} findings"
            lines = [
                ": ".join(filter(None, [_abbreviate(files), finding.message]))
                for finding, files in zip(group, names, strict=True)
            ]
        omitted = [f"... and {len(lines) - _MAX_LINES:,} more (all with --json)"] if len(lines) > _MAX_LINES else []
        yield [f"{severity}  {kind}: {headline}", *lines[:_MAX_LINES], *omitted]


def _abbreviate(files: list[str]) -> str:
    """Return the first three file names and the number of the others."""
    return ", ".join(files[:3]) + (f" and {len(files) - 3:,} more" if len(files) > 3 else "")


def _check_classes(dataset: Dataset) -> Iterator[Finding]:
    """Yield findings about classes: only one class, empty classes, classes missing from a split, and imbalance."""
    counts = {name: dataset.counts(split) for name, split in dataset.splits.items()}
    reported = set()
    if len(dataset.labels) < 2:
        yield Finding("single-class", "error", (), f"there is only one class, {dataset.labels[0]!r}")
    for split, class_folders in dataset.folders.items():
        missing = dataset.missing(dataset.splits[split]) if split in dataset.splits else dataset.labels
        for label, folder in class_folders.items():
            if label in missing:
                reported.add(label)
                yield Finding("empty-class", "error", (folder,), f"class {label!r} has no image in {split}")
    for index, label in enumerate(dataset.labels):
        present = [split for split in counts if counts[split][index]]
        absent = [split for split in counts if not counts[split][index]]
        if absent and label not in reported:
            reported.add(label)
            problem = f"is in {' and '.join(present)} but not in {' and '.join(absent)}" if present else "has no image"
            yield Finding("label-mismatch" if present else "empty-class", "error", (), f"class {label!r} {problem}")
    name = "train" if "train" in counts else next(iter(counts))
    count_of = {label: int(count) for label, count in zip(dataset.labels, counts[name], strict=True)}
    for label, count in count_of.items():
        if count == 1 and label not in reported:
            reported.add(label)
            yield Finding("single-picture-class", "warning", (), f"class {label!r} has one image in {name}")
    classes = [label for label in count_of if label not in reported]
    if classes and max(map(count_of.__getitem__, classes)) >= IMBALANCE * min(map(count_of.__getitem__, classes)):
        largest, smallest = max(classes, key=count_of.__getitem__), min(classes, key=count_of.__getitem__)
        message = (
            f"class {largest!r} has {count_of[largest]:,} images in {name}, class {smallest!r} has"
            f" {count_of[smallest]:,}"
        )
        yield Finding("imbalance", "warning", (), message)


def _check_people(dataset: Dataset) -> Iterator[Finding]:
    """Yield findings about people with no image or a single image. A person need not occur in every split."""
    counts = np.sum([dataset.counts(split) for split in dataset.splits.values()], axis=0)
    for label, count in zip(dataset.labels, counts, strict=True):
        if count == 0:
            yield Finding("empty-class", "error", (), f"person {label!r} has no image")
        elif count == 1:
            message = f"person {label!r} has one image, so recognition cannot be tested"
            yield Finding("single-picture-class", "warning", (), message)


def _find_similar_names(dataset: Dataset) -> Iterator[Finding]:
    """Yield findings about classes whose names look the same and are probably one class.

    For example, macOS decomposes letters such as é and 가 in file names; other systems do not.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for label in dataset.labels:
        groups[" ".join(unicodedata.normalize("NFKC", label).casefold().split())].append(label)
    for labels in groups.values():
        if len(labels) > 1:
            names = ", ".join(map(ascii, labels))
            message = f"classes differ only in capitals, spaces or the encoding of letters: {names}"
            yield Finding("similar-classes", "warning", (), message)


def _find_unused_files(dataset: Dataset) -> Iterator[Finding]:
    """Yield a finding about unused files: images outside of class folders, and class files without image extension."""
    if not dataset.folders:
        return
    prefixes = tuple(folder + os.sep for folders in dataset.folders.values() for folder in folders.values())
    images = {path for split in dataset.splits.values() if split.in_memory is None for path in split.images}
    if dataset.corrections is not None:  # images that a correction leaves out
        images |= {os.path.join(dataset.root, name) for name in dataset.corrections.rows}  # noqa: PTH118
    stores = (path.store for path in images if isinstance(path, StoredImage))
    tree = next((store for store in stores if isinstance(store, Tree)), Folder(dataset.root))
    unused = []
    for folder, names in tree.walk():
        is_class_folder = (folder + os.sep).startswith(prefixes)
        for name in names:
            is_image = name.rpartition(".")[2].lower() in SUFFIXES
            is_system_file = name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini")
            path = os.path.join(folder, name)  # noqa: PTH118
            if (is_image or is_class_folder) and not is_system_file and path not in images:
                unused.append(path)
    if unused:
        are = "file is" if len(unused) == 1 else "files are"
        yield Finding("ignored-file", "warning", tuple(sorted(unused)), f"{len(unused):,} {are} not used")


def _as_hashable(labels: np.ndarray) -> list[Any]:
    """Return labels as integers, or as tuples of 0 and 1 if images have several labels."""
    return [tuple(row) for row in labels.tolist()] if labels.ndim == 2 else labels.tolist()


def _find_unlabelled(dataset: Dataset) -> Iterator[Finding]:
    """Yield a finding about images without any label, in data with several labels per image."""
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


def _inspect_file(path: str, split: str, label: int | tuple[int, ...]) -> _ImageRecord | Finding:
    """Decode an image file and return its properties, or a finding if it cannot be read."""
    try:
        content = read_file(path)
        form, mode, size = identify(content, name=path)
        # Decode a JPEG at a small scale. This is faster, and still detects a truncated file, because all of it is read.
        opened = open_image(content, lambda *_: (2 * _THUMBNAIL, 2 * _THUMBNAIL), name=path)
        image = to_channels(opened, 1, (255, 255, 255))
        is_large = min(size) >= _MIN_SIDE
        digest = hashlib.sha256(content if is_large else f"{opened.mode} {opened.size}".encode() + opened.tobytes())
    except CorruptFileError as error:
        return Finding("unreadable", "error", (path,), error.cause)
    except UsageError:  # the file does not exist
        return Finding("unreadable", "error", (path,), "is missing or not a file")
    except (OSError, ValueError) as error:
        return Finding("unreadable", "error", (path,), f"cannot be converted ({error})")
    return _ImageRecord(
        path, split, label, digest.digest(), form, mode, size, _make_thumbnail(image) if is_large else None
    )


def _inspect_pixels(split: Split, pixels: np.ndarray) -> Iterator[_ImageRecord]:
    """Yield the properties of the images of a split in memory."""
    for index, image in enumerate(pixels):
        digest = hashlib.sha256(np.ascontiguousarray(image).data).digest()
        label, size, thumbnail = int(split.labels[index]), image.shape[1::-1], None
        if min(size) >= _MIN_SIDE and image.shape[2] in (1, 3):
            thumbnail = _make_thumbnail(to_image(image).convert("L"))
        yield _ImageRecord(split.image_name(index), split.name, label, digest, "", "", size, thumbnail)


def _make_thumbnail(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)).astype(np.uint8)


def _find_duplicates(records: list[_ImageRecord], *, people: bool) -> Iterator[Finding]:
    """Yield findings about equal images in two classes, in two splits (which invalidates scores) or within a split.

    With `people`, classes are people, and equal images of a person within a split are not reported.
    """
    groups = defaultdict(list)
    for record in records:
        groups[record.digest].append(record)
    for group in groups.values():
        splits = list(dict.fromkeys(record.split for record in group))
        names = tuple(record.name for record in group)
        if len({record.label for record in group}) > 1:
            message = "the same image under more than one name" if people else "the same image in more than one class"
            message += f", in {' and '.join(splits)}" if people and len(splits) > 1 else ""
            yield Finding("conflicting-labels", "warning", names, message)
        elif len(splits) > 1:
            yield Finding("duplicate", "warning", names, f"the same image in {' and '.join(splits)}")
        elif len(group) > 1 and not people:
            message = f"the same image {len(group)} times{_within_split(splits[0])}"
            yield Finding("duplicate", "warning", names, message)


def _within_split(split: str) -> str:
    """Return the end of a message about equal images of a class in a split; `all` is divided before training."""
    return "; a random split may put copies on both sides" if split == "all" else f" in {split}"


def _find_near_duplicates(records: list[_ImageRecord], labels: Sequence[str], *, people: bool) -> Iterator[Finding]:
    """Yield findings about near-duplicates: re-encoded, resized, slightly brighter or mirrored images.

    Each image is compared with all earlier images. Pairs with different labels come first, then pairs in two splits. If
    many images of a split look alike (drawings on white, aligned faces, frames of a film), a summary replaces the list.
    """
    # Of equal images, keep the first of each split and label: `_find_duplicates` reports the others.
    distinct = {
        (record.digest, record.split, record.label): record
        for record in reversed(records)
        if record.thumbnail is not None
    }
    images = [*reversed(distinct.values())]
    if len(images) < 2:
        return
    pairs, twin_count = [], 0
    split_order = {split: index for index, split in enumerate(dict.fromkeys(image.split for image in images))}
    thumbnails = np.stack([image.thumbnail for image in images if image.thumbnail is not None])
    for later, twins in zip(images, _find_twins(thumbnails), strict=True):
        candidates = [(images[index], is_mirrored) for index, is_mirrored in twins]
        candidates = [(image, is_mirrored) for image, is_mirrored in candidates if image.digest != later.digest]
        twin_count += any(image.split == later.split for image, _ in candidates)
        if people:
            candidates = [pair for pair in candidates if (pair[0].label, pair[0].split) != (later.label, later.split)]
        if candidates:
            earlier, is_mirrored = min(candidates, key=lambda pair: _rank_pair(pair[0], later))
            pairs.append((_rank_pair(earlier, later), split_order[later.split], earlier, later, is_mirrored))
    pairs.sort(key=lambda pair: pair[:2])
    findings = [
        Finding(
            "near-duplicate",
            "warning",
            (earlier.name, later.name),
            _describe_pair(earlier, later, labels, is_mirrored=is_mirrored),
        )
        for _, _, earlier, later, is_mirrored in pairs
    ]
    if len(findings) <= _LISTED_PAIRS or twin_count <= _COMMON_TWINS * len(images):
        yield from findings
        return
    ranks = Counter(rank for rank, *_ in pairs)
    files = tuple(dict.fromkeys(name for finding in findings for name in finding.files))
    message = (
        f"{len(findings):,} of {len(images):,} images look like another image ({ranks[0]:,} with another label,"
        f" {ranks[1]:,} in another split): this may be the nature of the data"
    )
    yield Finding("near-duplicate", "warning", files, message)


def _rank_pair(image: _ImageRecord, other: _ImageRecord) -> int:
    """Return how serious a pair of near-duplicates is: 0 with different labels, 1 in two splits, 2 otherwise."""
    return 0 if image.label != other.label else 1 if image.split != other.split else 2


def _describe_pair(image: _ImageRecord, other: _ImageRecord, labels: Sequence[str], *, is_mirrored: bool) -> str:
    """Return the message about a pair of near-duplicates."""
    message = f"probably the same image{' (mirrored)' if is_mirrored else ''}"
    if image.label != other.label:
        has_one_label = isinstance(image.label, int) and isinstance(other.label, int)
        names = f": {labels[image.label]!r} and {labels[other.label]!r}" if has_one_label else ""
        message += f" with different labels{names}"
    if image.split != other.split:
        return f"{message}{',' if image.label != other.label else ''} in {image.split} and {other.split}"
    return message if image.label != other.label else f"{message} twice{_within_split(image.split)}"


def _find_twins(thumbnails: np.ndarray) -> Iterator[list[tuple[int, bool]]]:
    """Yield, for each image, the indices of the earlier images that are near-duplicates, and whether they are mirrored.

    Hashes are compared with those of all earlier images (about a second for 20,000 images), thumbnails only with those
    of the nearest images by hash.
    """
    hashes, mirrored = _perceptual_hash(thumbnails), _perceptual_hash(thumbnails[:, :, ::-1])
    patterns, half = _normalised_patterns(thumbnails), _THUMBNAIL // 2
    for index in range(len(thumbnails)):
        twins = []
        pattern = patterns[index]
        flipped = pattern.reshape(half, half)[:, ::-1].reshape(-1)
        for other_hashes, own_pattern, is_mirrored in ((hashes, pattern, False), (mirrored, flipped, True)):
            distances = np.bitwise_count(other_hashes[:index] ^ hashes[index])
            nearest = np.flatnonzero(distances <= _MAX_HASH_BITS)
            if len(nearest) > _MAX_CANDIDATES:
                nearest = nearest[np.argsort(distances[nearest], kind="stable")[:_MAX_CANDIDATES]]
            twins += [
                (other, is_mirrored) for other in nearest[patterns[nearest] @ own_pattern >= _MIN_CORRELATION].tolist()
            ]
        yield twins


def _perceptual_hash(thumbnails: np.ndarray) -> np.ndarray:
    """Return a perceptual hash of each thumbnail, uint64 (n).

    Each bit tells whether one of the 64 lowest cosine components, without the mean, exceeds their median.
    """
    positions = np.arange(_THUMBNAIL)
    cosines = np.cos(np.pi / _THUMBNAIL * (positions[None, :] + 0.5) * np.arange(8)[:, None]).astype(np.float32)
    chunks = [
        cosines @ thumbnails[start : start + 4096].astype(np.float32) @ cosines.T
        for start in range(0, len(thumbnails), 4096)
    ]
    components = np.concatenate(chunks).reshape(len(thumbnails), 64)
    components[:, 0] = 0
    is_above = components > np.median(components, axis=1, keepdims=True)
    return np.packbits(is_above, axis=1).view(np.uint64)[:, 0]


def _normalised_patterns(thumbnails: np.ndarray) -> np.ndarray:
    """Return thumbnails at half their size with mean 0 and norm 1, float32 (n, 256); uniform thumbnails become 0.

    The dot product of two patterns is the correlation of the thumbnails.
    """
    half = _THUMBNAIL // 2
    small = thumbnails.reshape(-1, half, 2, half, 2).mean(axis=(2, 4), dtype=np.float32).reshape(-1, half**2)
    small -= small.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(small, axis=1, keepdims=True)
    return np.where(norms > half, small / np.maximum(norms, half), 0)


def _find_misleading_extensions(records: list[_ImageRecord]) -> Iterator[Finding]:
    """Yield findings about files whose extension is that of another image format."""
    for record in records:
        ending = record.name.rpartition(".")[2].lower()
        image_format = "JPEG" if record.format == "MPO" else record.format
        if image_format and ending in SUFFIXES and SUFFIXES[ending] != image_format:
            yield Finding("lying-extension", "warning", (record.name,), f"ends in .{ending} but is {image_format}")


def _find_other_modes(records: list[_ImageRecord]) -> Iterator[Finding]:
    """Yield a finding about each image mode (such as L or RGB) except the most common one."""
    counts = Counter(record.mode for record in records if record.mode)
    for mode, count in counts.most_common()[1:]:
        names = tuple(record.name for record in records if record.mode == mode)
        common_mode, common_count = counts.most_common(1)[0]
        are = "image is" if count == 1 else "images are"
        yield Finding("mixed-modes", "warning", names, f"{count:,} {are} {mode}, {common_count:,} are {common_mode}")


def _find_other_sizes(records: list[_ImageRecord]) -> Iterator[Finding]:
    """Yield a finding about images of another size if nearly all have the same size; otherwise about tiny images."""
    if not records:
        return
    common_size, count = Counter(record.size for record in records).most_common(1)[0]
    median_side = float(np.median([min(record.size) for record in records]))
    if _COMMON_SIZE * len(records) <= count < len(records):
        names = tuple(record.name for record in records if record.size != common_size)
        problem = f"not {common_size[0]} x {common_size[1]} like the others"
    else:
        names = tuple(record.name for record in records if _TINY * min(record.size) < median_side)
        problem = f"over {_TINY} times smaller than usual"
    if names:
        are = "image is" if len(names) == 1 else "images are"
        yield Finding("mixed-sizes", "warning", names, f"{len(names):,} {are} {problem}")
