"""`vitrail bench`: measure every engine in every precision on this machine. `--engine auto` reads the results."""

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
from vitrail.inference.benchmark_store import Agreement, BenchmarkStore, Speed, Workload, describe_machine
from vitrail.inference.engine import EngineChoice, batch_for, thread_count
from vitrail.inference.measure import measure_speeds
from vitrail.inference.registry import ENGINES, PRECISIONS
from vitrail.inference.select import find_usable, list_choices

_MAX_SLOWDOWN = 4  # relative to the fastest engine in float32: predictions of slower choices would take hours
_BATCH = 64


class EngineComparison(NamedTuple):
    """Predictions of engine choices for the same images."""

    data: str
    decisions: dict[EngineChoice, np.ndarray]
    """Predictions as `DecisionRule.decide` returns them. Those of the first choice are the reference."""
    truth: np.ndarray | None
    """True labels in the same form, if the data has the bundle's classes."""

    @property
    def reference(self) -> EngineChoice:
        """The engine choice with which the others are compared."""
        return next(iter(self.decisions))

    def agreement(self, choice: EngineChoice) -> Agreement:
        """Return how many predictions of an engine choice are the same as those of the reference."""
        expected = self.decisions[self.reference]
        same = int((self.decisions[choice] == expected).all(axis=1).sum())
        if self.truth is None:
            return Agreement(self.data, len(expected), same)
        correct, correct_in_float32 = (int(self.is_correct(name).sum()) for name in (choice, self.reference))
        return Agreement(self.data, len(expected), same, correct, correct_in_float32)

    def is_correct(self, choice: EngineChoice) -> np.ndarray:
        """Return whether each prediction of an engine choice is correct (n)."""
        return (self.decisions[choice] == self.truth).all(axis=1)


def benchmark_engines(
    path: str,
    data: AnyData | None = None,
    *,
    split: str | None = None,
    threads: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Measure speed, start, memory, size and predictions of each engine in each precision.

    Returns the report that `bench --json` prints, and stores the measurements for `--engine auto`. Without `data`,
    predictions for embedded images are compared and not stored. `device` is where torch computes. Engines that run only
    on the CPU are left out for another device.
    """
    info = read_bundle_info(path, weights=False)
    info.check_classifies()
    dataset = open_images("fashion-40" if data is None else data)
    images = dataset.for_evaluation(split)
    threads = thread_count(None if threads is None else check_integer("threads", threads, low=1, high=4096))
    workload = Workload(batch_for(info.config), threads, 1, device)
    choices, refused = find_usable(
        path, [choice for choice in list_choices() if ENGINES[choice.engine].computes_on(device)]
    )
    store, speeds = BenchmarkStore.read(path), measure_speeds(path, choices, workload)
    store.save_speeds(workload, speeds, refused)
    fastest = min(speed.image for choice, speed in speeds.items() if choice.precision == PRECISIONS[0])
    slow = [choice for choice in choices[1:] if speeds[choice].image > _MAX_SLOWDOWN * fastest]
    fast = [choice for choice in choices if choice not in slow]
    comparison = _compare_decisions(path, device, info, fast, images, dataset.name, dataset.labels)
    if data is not None:
        store.save_agreements({choice: comparison.agreement(choice) for choice in comparison.decisions})
    return {
        "bundle": path,
        "machine": describe_machine(),
        "load": workload._asdict(),
        "data": comparison.data,
        "ways": [_benchmark_row(info, choice, speeds[choice], comparison) for choice in choices],
        "left_out": [{**choice._asdict(), "reason": reason.text} for choice, reason in refused.items()],
        "notes": [
            *dataset.notes,
            *_label_notes(info, dataset, comparison),
            *(f"predictions of {choice} are not compared: it is too slow on this machine" for choice in slow),
        ],
    }


def _label_notes(info: BundleInfo, dataset: Dataset, comparison: EngineComparison) -> list[str]:
    """Return notes on how the classes of the data were matched with the bundle's, or that they could not be."""
    if comparison.truth is not None:
        return note_match(info.labels, info.config.classes, dataset.labels)
    if not dataset.labels:
        return []
    return [f"accuracy is not measured: {dataset.name!r} has other classes than the bundle"]


def _compare_decisions(
    path: str,
    device: str,
    info: BundleInfo,
    choices: list[EngineChoice],
    split: Split,
    name: str,
    labels: tuple[str, ...],
) -> EngineComparison:
    """Return the predictions of all engine choices for a split. Each image is decoded once."""
    loader = Loader(split, info.preprocess, batch=_BATCH, shuffle=False, workers=2)
    meter, batches = Meter(len(split), "images"), {choice: [] for choice in choices}
    with contextlib.ExitStack() as stack:
        runs = {
            choice: stack.enter_context(ENGINES[choice.engine].open(path, device, choice.precision).running(None))
            for choice in choices
        }
        for batch in loader.epoch():
            for choice, run in runs.items():
                batches[choice].append(info.answer.decide(run(batch.pixels.numpy()).logits))
            meter(sum(map(len, batches[choices[0]])))
    decisions = {choice: np.concatenate(arrays) for choice, arrays in batches.items()}
    return EngineComparison(name, decisions, _map_truth(info, split.labels, labels))


def _map_truth(info: BundleInfo, labels: np.ndarray, names: tuple[str, ...]) -> np.ndarray | None:
    """Return the labels of the data in the form of the bundle's predictions.

    None if the data has no labels, or other classes than the bundle.
    """
    if not names:
        return None
    try:
        class_indices, _ = match_labels(info.labels, info.config.classes, names)
    except ValueError:
        return None
    is_multi_label = isinstance(info.answer, MultiLabel)
    if labels.ndim > 1 and not is_multi_label:
        return None
    truth = map_labels(labels, class_indices, info.config.classes, several=is_multi_label)
    return truth.reshape(len(labels), -1)


def _benchmark_row(
    info: BundleInfo, choice: EngineChoice, speed: Speed, comparison: EngineComparison
) -> dict[str, Any]:
    """Return the results of an engine choice as JSON."""
    row: dict[str, Any] = {
        **choice._asdict(),
        "depends_on_batch": ENGINES[choice.engine].depends_on_batch(info.config, choice.precision),
        "images_per_second": 1 / speed.image,
        "start_seconds": speed.start,
        "memory": speed.memory,
        "size": speed.size,
    }
    if choice not in comparison.decisions:
        return row
    _, images, same, *_ = comparison.agreement(choice)
    row |= {"images": images, "same": same, "changed_interval": list(wilson_interval(images - same, images))}
    if comparison.truth is not None:
        reference, correct = (comparison.is_correct(name) for name in (comparison.reference, choice))
        paired = PairedComparison.of(reference, correct)
        row |= {
            "accuracy": float(correct.mean()),
            "accuracy_interval": list(wilson_interval(int(correct.sum()), images)),
            "only_float32": paired.only_first,
            "only_this": paired.only_second,
            "p_value": paired.p_value,
        }
    return row
