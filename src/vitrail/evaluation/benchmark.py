"""`vitrail bench`: every engine in every precision on this machine. `auto` reads what it measures."""

import contextlib
from typing import Any, NamedTuple

import numpy as np

from vitrail.bundles.decision import MultiLabel
from vitrail.bundles.metadata import BundleInfo, read_bundle_info
from vitrail.core.intervals import wilson_interval
from vitrail.core.settings import check_integer
from vitrail.core.terminal import Meter
from vitrail.data.dataset import Dataset, Split
from vitrail.data.loader import Loader
from vitrail.data.sources.registry import AnyData, open_images
from vitrail.evaluation.labels import match_labels, note_match
from vitrail.evaluation.paired import PairedComparison
from vitrail.evaluation.protocols import map_labels
from vitrail.inference.benchmark_store import Agreement, BenchmarkStore, Speed, Workload, machine
from vitrail.inference.engine import EngineChoice, batch_for, cores, limit_threads
from vitrail.inference.measure import measure_speeds
from vitrail.inference.registry import ENGINES, PRECISIONS
from vitrail.inference.select import find_usable, list_choices

_TOO_SLOW = 4  # times as slow as the fastest in float32: nobody would take it, and its answers would take hours
_BATCH = 64


class EngineComparison(NamedTuple):
    """Answers of engine choices to the same images."""

    data: str
    decisions: dict[EngineChoice, np.ndarray]
    """Answers, as `DecisionRule.decide` gives them; the first choice's are those that others are compared with."""
    truth: np.ndarray | None
    """Right answers, if the data has the bundle's classes."""

    def agreement(self, choice: EngineChoice) -> Agreement:
        """How many answers of an engine choice are those of the first one."""
        exact, first = next(iter(self.decisions.items()))
        same = int((self.decisions[choice] == first).all(axis=1).sum())
        rights = () if self.truth is None else (int(self.right(one).sum()) for one in (choice, exact))
        return Agreement(self.data, len(first), same, *rights)

    def right(self, choice: EngineChoice) -> np.ndarray:
        """Which answers of an engine choice are right."""
        return (self.decisions[choice] == self.truth).all(axis=1)


def benchmark_engines(
    path: str,
    data: AnyData | None = None,
    *,
    split: str | None = None,
    threads: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Speed, start, memory, size and answers of each engine in each precision, as `bench --json` prints them. Without
    data, answers to embedded images are compared. Torch computes on the device; other engines, which only have the CPU,
    are left out for any other device that is named."""
    parts = read_bundle_info(path, weights=False)
    parts.check_classifies()
    dataset = open_images("fashion-40" if data is None else data)
    chosen = dataset.for_evaluation(split)
    threads = cores() if threads is None else limit_threads(check_integer("threads", threads, low=1, high=4096))
    load = Workload(batch_for(parts.config), threads, 1, device)
    choices, refused = find_usable(
        path, [choice for choice in list_choices() if ENGINES[choice.engine].computes_on(device)]
    )
    measured, speeds = BenchmarkStore.read(path), measure_speeds(path, choices, load)
    measured.keep_speeds(load, speeds, refused)
    fastest = min(speed.image for choice, speed in speeds.items() if choice.precision == PRECISIONS[0])
    slow = [choice for choice in choices[1:] if speeds[choice].image > _TOO_SLOW * fastest]
    quick = [choice for choice in choices if choice not in slow]
    compared = _compare(path, device, parts, quick, chosen, dataset.name, dataset.labels)
    if data is not None:
        measured.keep_agreements({choice: compared.agreement(choice) for choice in compared.decisions})
    return {
        "bundle": path,
        "machine": machine(),
        "load": load._asdict(),
        "data": compared.data,
        "ways": [_row(parts, choice, speeds[choice], compared) for choice in choices],
        "left_out": [{**choice._asdict(), "reason": reason.text} for choice, reason in refused.items()],
        "notes": [
            *dataset.notes,
            *_notes(parts, dataset, compared),
            *(f"answers of {choice} are not compared: it is too slow here" for choice in slow),
        ],
    }


def _notes(parts: BundleInfo, dataset: Dataset, compared: EngineComparison) -> list[str]:
    """How classes were matched, or that they could not be."""
    if compared.truth is not None:
        return note_match(parts.labels, parts.config.classes, dataset.labels)
    return [f"classes of {dataset.name!r} are not the bundle's, so there is no accuracy"] if dataset.labels else []


def _compare(
    path: str,
    device: str,
    parts: BundleInfo,
    choices: list[EngineChoice],
    split: Split,
    name: str,
    labels: tuple[str, ...],
) -> EngineComparison:
    """The answers of all engine choices to a split; each image is decoded once."""
    loader = Loader(split, parts.preprocess, batch=_BATCH, shuffle=False, workers=2)
    meter, found = Meter(len(split), "images"), {choice: [] for choice in choices}
    with contextlib.ExitStack() as stack:
        runs = {
            choice: stack.enter_context(ENGINES[choice.engine].open(path, device, choice.precision).running(None))
            for choice in choices
        }
        for batch in loader.epoch():
            for choice, run in runs.items():
                found[choice].append(parts.answer.decide(run(batch.pixels.numpy()).logits))
            meter(sum(map(len, found[choices[0]])))
    decisions = {choice: np.concatenate(rows) for choice, rows in found.items()}
    return EngineComparison(name, decisions, _truth(parts, split.labels, labels))


def _truth(parts: BundleInfo, labels: np.ndarray, names: tuple[str, ...]) -> np.ndarray | None:
    """The labels as the bundle would answer them; None if it has other classes, or if there are none."""
    if not names:
        return None
    try:
        place, _ = match_labels(parts.labels, parts.config.classes, names)
    except ValueError:
        return None
    several = isinstance(parts.answer, MultiLabel)
    if labels.ndim > 1 and not several:
        return None
    return map_labels(labels, place, parts.config.classes, several=several).reshape(len(labels), -1)


def _row(parts: BundleInfo, choice: EngineChoice, speed: Speed, compared: EngineComparison) -> dict[str, Any]:
    row: dict[str, Any] = {
        **choice._asdict(),
        "depends_on_batch": ENGINES[choice.engine].depends_on_batch(parts.config, choice.precision),
        "images_per_second": 1 / speed.image,
        "start_seconds": speed.start,
        "memory": speed.memory,
        "size": speed.size,
    }
    if choice not in compared.decisions:
        return row
    _, images, same, *_ = compared.agreement(choice)
    row |= {"images": images, "same": same, "changed_interval": list(wilson_interval(images - same, images))}
    if compared.truth is not None:
        first, right = (compared.right(one) for one in (next(iter(compared.decisions)), choice))
        paired = PairedComparison.of(first, right)
        row |= {
            "accuracy": float(right.mean()),
            "accuracy_interval": list(wilson_interval(int(right.sum()), images)),
            "only_float32": paired.one,
            "only_this": paired.other,
            "p_value": paired.p_value,
        }
    return row
