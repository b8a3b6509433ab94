"""What is wrong with a folder of pictures, before training finds it out the hard way."""

import dataclasses
import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from vitrail.data.dataset import Dataset, Split
from vitrail.data.sources import SUFFIXES
from vitrail.errors import VitrailError
from vitrail.images.decode import identify, open_picture, to_channels

IMBALANCE = 10  # the largest class over the smallest, from which a warning is due
_SAME_SIZE = 0.9  # share of pictures of one size from which other sizes are remarkable
_TINY = 8  # times smaller than the usual picture

# Two pictures are near duplicates if their perceptual hashes (64 bits) differ in few bits and their thumbnails agree.
# Chosen on photos: of 396 re-encoded, halved, brightened or mirrored ones all are found; of 203,000 pairs of different
# photos none is, of 2.3 million pairs of aligned faces seven.
_HASH_BITS = 14
_AGREEMENT = 0.92  # correlation of thumbnails
_THUMBNAIL = 32
_LOOKED_AT = 64  # pixels of the shorter side below which all pictures look alike


class Finding(NamedTuple):
    """One thing found."""

    kind: str
    severity: Literal["error", "warning"]
    files: tuple[str, ...]
    message: str

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "files": list(self.files)}


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What one readable picture is like."""

    name: str
    split: str
    digest: bytes
    format: str
    mode: str
    size: tuple[int, int]
    thumbnail: np.ndarray | None


def examine(dataset: Dataset, *, workers: int = 2) -> list[Finding]:
    """Every finding, errors first."""
    findings = [*_classes(dataset)]
    seen: list[_Seen] = []
    for split in dataset.splits.values():
        if (pixels := split.in_memory) is not None:
            seen += _look_at_memory(split, pixels)
        else:
            with ThreadPoolExecutor(workers) as pool:
                results = list(pool.map(_look, split.pictures, itertools.repeat(split.name)))
            seen += [result for result in results if isinstance(result, _Seen)]
            findings += [result for result in results if isinstance(result, Finding)]
    findings += [*_duplicates(seen), *_lying_endings(seen), *_modes(seen), *_sizes(seen)]
    return sorted(findings, key=lambda finding: finding.severity != "error")


def _classes(dataset: Dataset) -> Iterator[Finding]:
    counts = {name: np.bincount(split.labels, minlength=len(dataset.labels)) for name, split in dataset.splits.items()}
    none = np.zeros(len(dataset.labels), int)
    reported = set()
    for split, listed in dataset.folders.items():
        for index in (dataset.labels.index(label) for label in listed):
            label = dataset.labels[index]
            if counts.get(split, none)[index] == 0:
                reported.add(label)
                where = str(Path(dataset.root, *([] if split == "all" else [split]), label))
                yield Finding("empty-class", "error", (where,), f"class {label!r} has no picture in {split}")
    for index, label in enumerate(dataset.labels):
        present = [split for split in counts if counts[split][index]]
        absent = [split for split in counts if not counts[split][index]]
        if present and absent and label not in reported:
            reported.add(label)
            message = f"class {label!r} is in {' and '.join(present)} but not in {' and '.join(absent)}"
            yield Finding("label-mismatch", "error", (), message)
    name = "train" if "train" in counts else next(iter(counts))
    training = {label: int(count) for label, count in zip(dataset.labels, counts[name], strict=True)}
    for label, count in training.items():
        if count == 1 and label not in reported:
            reported.add(label)
            yield Finding("single-picture-class", "warning", (), f"class {label!r} has one picture in {name}")
    rest = {label: count for label, count in training.items() if label not in reported}
    if rest and max(rest.values()) >= IMBALANCE * min(rest.values()):
        most, least = max(rest, key=rest.__getitem__), min(rest, key=rest.__getitem__)
        message = f"class {most!r} has {rest[most]:,} pictures in {name}, class {least!r} has {rest[least]:,}"
        yield Finding("imbalance", "warning", (), message)


def _look(path: str, split: str) -> _Seen | Finding:
    try:
        form, mode, size = identify(path)
        # A JPEG is decoded small: all of the file is read, so that a cut shows, but fewer pixels are computed.
        image = to_channels(open_picture(path, lambda *_: (2 * _THUMBNAIL, 2 * _THUMBNAIL)), 1, (255, 255, 255))
        digest = hashlib.sha256(Path(path).read_bytes()).digest()
    except VitrailError as error:
        return Finding("unreadable", "error", (path,), str(error))
    except (OSError, ValueError) as error:
        return Finding("unreadable", "error", (path,), f"{path!r} cannot be read ({error})")
    return _Seen(path, split, digest, form, mode, size, _thumbnail(image) if min(size) >= _LOOKED_AT else None)


def _look_at_memory(split: Split, pixels: np.ndarray) -> Iterator[_Seen]:
    for index, picture in enumerate(pixels):
        digest = hashlib.sha256(np.ascontiguousarray(picture).data).digest()
        yield _Seen(split.call(index), split.name, digest, "", "", picture.shape[1::-1], None)


def _thumbnail(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize((_THUMBNAIL, _THUMBNAIL), Image.Resampling.BOX)).astype(np.uint8)


def _duplicates(seen: list[_Seen]) -> Iterator[Finding]:
    """The same picture in two splits: the score of one is then no proof."""
    groups = defaultdict(list)
    for one in seen:
        groups[one.digest].append(one)
    copied = set()
    for group in groups.values():
        splits = list(dict.fromkeys(one.split for one in group))
        if len(splits) > 1:
            names = tuple(one.name for one in group)
            copied |= set(names)
            yield Finding("duplicate", "warning", names, f"the same file in {' and '.join(splits)}")
    looked_at = [one for one in seen if one.thumbnail is not None and one.name not in copied]
    yield from _near_duplicates(looked_at)


def _near_duplicates(seen: list[_Seen]) -> Iterator[Finding]:
    """Pictures in two splits that a person would call the same: re-encoded, resized, a little brighter, mirrored."""
    splits = list(dict.fromkeys(one.split for one in seen))
    if len(splits) < 2:
        return
    thumbnails = np.stack([one.thumbnail for one in seen if one.thumbnail is not None]).astype(np.float32)
    split_of = np.array([splits.index(one.split) for one in seen])
    hashes, mirrored = _perceptual_hash(thumbnails), _perceptual_hash(thumbnails[:, :, ::-1])
    for later in range(1, len(splits)):
        earlier = np.flatnonzero(split_of < later)
        for index in np.flatnonzero(split_of == later):
            for candidates, turn in ((hashes, 1), (mirrored, -1)):
                distance = np.bitwise_count(candidates[earlier] ^ hashes[index])
                for other in earlier[distance <= _HASH_BITS]:
                    if _agreement(thumbnails[index], thumbnails[other][:, ::turn]) < _AGREEMENT:
                        continue
                    pair, how = (seen[other], seen[index]), " mirrored" if turn < 0 else ""
                    message = f"the same picture{how} in {pair[0].split} and {pair[1].split}"
                    yield Finding("near-duplicate", "warning", tuple(one.name for one in pair), message)
                    break
                else:
                    continue
                break


def _perceptual_hash(thumbnails: np.ndarray) -> np.ndarray:
    """Which of the 64 slowest cosine components, the mean aside, lie above their median: 64 bits a picture."""
    place = np.arange(_THUMBNAIL)
    cosines = np.cos(np.pi / _THUMBNAIL * (place[None, :] + 0.5) * np.arange(8)[:, None]).astype(np.float32)
    components = (cosines @ thumbnails @ cosines.T).reshape(len(thumbnails), 64)
    components[:, 0] = 0
    is_above = components > np.median(components, axis=1, keepdims=True)
    return np.packbits(is_above, axis=1).view(np.uint64)[:, 0]


def _agreement(one: np.ndarray, other: np.ndarray) -> float:
    """Correlation of two thumbnails at half their size; plain ones agree with nothing."""
    half = _THUMBNAIL // 2
    one, other = (picture.reshape(half, 2, half, 2).mean(axis=(1, 3)) for picture in (one, other))
    one, other = one - one.mean(), other - other.mean()
    spread = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float((one * other).sum()) / spread if spread > half**2 else 0.0


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
        are = "picture is" if count == 1 else "pictures are"
        yield Finding("mixed-modes", "warning", names, f"{count:,} {are} {mode}, {most:,} are {usual}")


def _sizes(seen: list[_Seen]) -> Iterator[Finding]:
    """Photos differ in size; that some differ is remarkable only where nearly all are equal, or where some are tiny."""
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
        are = "picture is" if len(odd) == 1 else "pictures are"
        yield Finding("mixed-sizes", "warning", tuple(one.name for one in odd), f"{len(odd):,} {are} {than}")
