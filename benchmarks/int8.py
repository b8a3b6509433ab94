"""Predictions, accuracy and CPU time of an engine in int8 compared with float32, for each bundle.

    vitrail convert $VITRAIL_SHARED/data/deit-ti16/model.safetensors deit
    .venv/bin/python benchmarks/int8.py $VITRAIL_SHARED/data/imagenet-val-500 deit --batch 4
    .venv/bin/python benchmarks/int8.py fashion-mnist fashion --batch 64 --engine openvino

Times are CPU times of a single computing thread, alternating between batches of 1, 4 and 16, so that other programs
on the machine have little influence. If an engine fails its verification in int8, the row of the bundle has the
error.
"""

import argparse
import contextlib
import statistics
import time

import numpy as np

from vitrail.bundles.metadata import read_bundle_info
from vitrail.core.errors import UnprovedError
from vitrail.core.intervals import wilson_interval
from vitrail.data.loader import Loader
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.labels import match_labels
from vitrail.evaluation.paired import PairedComparison
from vitrail.evaluation.protocols import map_labels
from vitrail.inference.registry import ENGINES

PRECISIONS = ("float32", "int8")
BATCHES, ROUNDS = (1, 4, 16), 9


def predict_all(runs, info, split, batch):
    """Return the predicted classes of all images of a split, by precision."""
    predictions = {precision: [] for precision in runs}
    for images in Loader(split, info.preprocess, batch=batch, shuffle=False, workers=0).epoch():
        for precision, run in runs.items():
            predictions[precision].append(info.answer.decide(run(images.pixels.numpy()).logits)[:, 0])
    return {precision: np.concatenate(rows) for precision, rows in predictions.items()}


def measure_cpu_times(runs, info, split):
    """Return the milliseconds of CPU time per image, by precision and batch size."""
    crops = np.stack([info.preprocess.crop(split.images[i]) for i in range(max(BATCHES))])
    rounds = {(precision, batch): [] for precision in runs for batch in BATCHES}
    for _ in range(1 + ROUNDS):  # the first round warms up
        for (precision, batch), seconds in rounds.items():
            start = time.process_time()
            for _ in range(max(BATCHES) // batch):
                runs[precision](crops[:batch])
            seconds.append((time.process_time() - start) / max(BATCHES))
    return {key: 1000 * statistics.median(seconds[1:]) for key, seconds in rounds.items()}


def compare(path, data, batch, engine):
    """Return the row of a bundle in the table."""
    info, dataset = read_bundle_info(path, weights=False), open_data(data)
    split = dataset.for_evaluation(None)
    class_of_label, _ = match_labels(info.labels, info.config.classes, dataset.labels)
    truth = map_labels(split.labels, class_of_label, info.config.classes, several=False)
    with contextlib.ExitStack() as stack:
        try:
            engines = {precision: ENGINES[engine].open(path, None, precision) for precision in PRECISIONS}
        except UnprovedError as error:
            return f"| {path} | {info.config.name} | {error} |"
        runs = {precision: stack.enter_context(opened.running(1)) for precision, opened in engines.items()}
        exact, rounded = predict_all(runs, info, split, batch).values()
        milliseconds = measure_cpu_times(runs, info, split)
    changed, paired = int((exact != rounded).sum()), PairedComparison.of(exact == truth, rounded == truth)
    low, high = wilson_interval(changed, len(truth))
    speed = ", ".join(
        " to ".join(f"{milliseconds[precision, size]:.2f}" for precision in PRECISIONS) for size in BATCHES
    )
    return (
        f"| {path} | {info.config.name} | {(exact == truth).sum():,} |"
        f" {(rounded == truth).sum():,} of {len(truth):,} |"
        f" {changed} ({changed / len(truth):.2%}; {low:.2%} to {high:.2%}) |"
        f" {paired.only_second} against {paired.only_first}, p = {paired.p_value:.2g} | {speed} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--engine", choices=("onnx", "openvino"), default="onnx")
    options = parser.parse_args()
    sizes = ", ".join(map(str, BATCHES))
    print(
        "| bundle | model | correct, float32 | correct, int8 | changed | paired test |"
        f" ms, float32 to int8, at batch {sizes} |"
    )
    print("|---|---|---|---|---|---|---|")
    for path in options.bundles:
        print(compare(path, options.data, options.batch, options.engine), flush=True)


if __name__ == "__main__":
    main()
