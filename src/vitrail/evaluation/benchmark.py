"""`vitrail bench`: every engine in every precision on this machine. `auto` reads what it measures."""

import contextlib
from typing import Any, NamedTuple

import numpy as np

from vitrail.bundles.decision import SeveralLabels
from vitrail.bundles.metadata import Parts, read_parts
from vitrail.core.intervals import wilson
from vitrail.core.settings import check_integer
from vitrail.core.terminal import Meter
from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import Loader
from vitrail.data.sources.registry import open_images
from vitrail.evaluation.labels import match_labels, note_match
from vitrail.evaluation.paired import Paired
from vitrail.evaluation.protocols import place_labels
from vitrail.inference.benchmark_store import Agreement, Load, Measured, Speed, machine
from vitrail.inference.engine import Way, batch_for, cores, limit_threads
from vitrail.inference.measure import measure
from vitrail.inference.registry import ENGINES, PRECISIONS
from vitrail.inference.select import every_way, find_usable

_TOO_SLOW = 4  # times as slow as the fastest in float32: nobody would take it, and its answers would take hours
_BATCH = 64


class Compared(NamedTuple):
    """Answers of ways to the same images."""

    data: str
    decisions: dict[Way, np.ndarray]
    """Answers, as `Answer.decide` gives them; the first way's are those that others are compared with."""
    truth: np.ndarray | None
    """Right answers, if the data has the bundle's classes."""

    def agreement(self, way: Way) -> Agreement:
        """How many answers of a way are those of the first one."""
        exact, first = next(iter(self.decisions.items()))
        same = int((self.decisions[way] == first).all(axis=1).sum())
        rights = () if self.truth is None else (int(self.right(one).sum()) for one in (way, exact))
        return Agreement(self.data, len(first), same, *rights)

    def right(self, way: Way) -> np.ndarray:
        """Which answers of a way are right."""
        return (self.decisions[way] == self.truth).all(axis=1)


def bench(
    path: str,
    data: str | None = None,
    *,
    split: str | None = None,
    threads: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Speed, start, memory, size and answers of each engine in each precision, as `bench --json` prints them. Without
    data, answers to embedded images are compared. Torch computes on the device; other engines, which only have the CPU,
    are left out for any other device that is named."""
    parts = read_parts(path, weights=False)
    parts.check_classifies()
    dataset = open_images("fashion-40" if data is None else data)
    chosen = dataset.for_evaluation(split)
    threads = cores() if threads is None else limit_threads(check_integer("threads", threads, low=1, high=4096))
    load = Load(batch_for(parts.config), threads, 1, device)
    ways, refused = find_usable(path, [way for way in every_way() if ENGINES[way.engine].computes_on(device)])
    measured, speeds = Measured.read(path), measure(path, ways, load)
    measured.keep_speeds(load, speeds, refused)
    fastest = min(speed.image for way, speed in speeds.items() if way.precision == PRECISIONS[0])
    slow = [way for way in ways[1:] if speeds[way].image > _TOO_SLOW * fastest]
    quick = [way for way in ways if way not in slow]
    compared = _compare(path, device, parts, quick, chosen, dataset.name, dataset.labels)
    if data is not None:
        measured.keep_agreements({way: compared.agreement(way) for way in compared.decisions})
    return {
        "bundle": path,
        "machine": machine(),
        "load": load._asdict(),
        "data": compared.data,
        "ways": [_row(parts, way, speeds[way], compared) for way in ways],
        "left_out": [{**way._asdict(), "reason": reason.text} for way, reason in refused.items()],
        "notes": [
            *dataset.notes,
            *_notes(parts, dataset, compared),
            *(f"answers of {way} are not compared: it is too slow here" for way in slow),
        ],
    }


def _notes(parts: Parts, dataset: Dataset, compared: Compared) -> list[str]:
    """How classes were matched, or that they could not be."""
    if compared.truth is not None:
        return note_match(parts.labels, parts.config.classes, dataset.labels)
    return [f"classes of {dataset.name!r} are not the bundle's, so there is no accuracy"] if dataset.labels else []


def _compare(
    path: str, device: str, parts: Parts, ways: list[Way], split: Split, name: str, labels: tuple[str, ...]
) -> Compared:
    """The answers of all ways to a split; each image is decoded once."""
    loader = Loader(split, parts.preprocess, batch=_BATCH, shuffle=False, workers=2)
    meter, found = Meter(len(split), "images"), {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        runs = {
            way: stack.enter_context(ENGINES[way.engine].open(path, device, way.precision).running(None))
            for way in ways
        }
        for batch in loader.epoch():
            for way, run in runs.items():
                found[way].append(parts.answer.decide(run(batch.pixels.numpy()).logits))
            meter(sum(map(len, found[ways[0]])))
    decisions = {way: np.concatenate(rows) for way, rows in found.items()}
    return Compared(name, decisions, _truth(parts, split.labels, labels))


def _truth(parts: Parts, labels: np.ndarray, names: tuple[str, ...]) -> np.ndarray | None:
    """The labels as the bundle would answer them; None if it has other classes, or if there are none."""
    if not names:
        return None
    try:
        place, _ = match_labels(parts.labels, parts.config.classes, names)
    except ValueError:
        return None
    several = isinstance(parts.answer, SeveralLabels)
    if labels.ndim > 1 and not several:
        return None
    return place_labels(labels, place, parts.config.classes, several=several).reshape(len(labels), -1)


def _row(parts: Parts, way: Way, speed: Speed, compared: Compared) -> dict[str, Any]:
    row: dict[str, Any] = {
        **way._asdict(),
        "depends_on_batch": ENGINES[way.engine].depends_on_batch(parts.config, way.precision),
        "images_per_second": 1 / speed.image,
        "start_seconds": speed.start,
        "memory": speed.memory,
        "size": speed.size,
    }
    if way not in compared.decisions:
        return row
    _, images, same, *_ = compared.agreement(way)
    row |= {"images": images, "same": same, "changed_interval": list(wilson(images - same, images))}
    if compared.truth is not None:
        first, right = (compared.right(one) for one in (next(iter(compared.decisions)), way))
        paired = Paired.of(first, right)
        row |= {
            "accuracy": float(right.mean()),
            "accuracy_interval": list(wilson(int(right.sum()), images)),
            "only_float32": paired.one,
            "only_this": paired.other,
            "p_value": paired.p_value,
        }
    return row
