"""Accuracy and time of training in bfloat16 compared with float32, over seeds, with the command line.

    vitrail convert $VITRAIL_SHARED/data/deit-ti16/model.safetensors deit
    .venv/bin/python benchmarks/bfloat16.py --finetune deit $VITRAIL_SHARED/data/hymenoptera

Each run is a separate process that trains for a fixed number of epochs; the precisions alternate. Each model predicts
the test images once. The interval of the difference covers other seeds and other test images.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import vitrail
from vitrail.data.sources.registry import open_data
from vitrail.lab.statistics import difference, pool

PRECISIONS = ("float32", "bfloat16")


def train(arguments, data, precision, seed, output):
    """Train once. Return whether each prediction of the test images is correct, and the seconds of the command."""
    command = [sys.executable, "-m", "vitrail", *arguments, "--output", str(output), "--seed", str(seed)]
    start = time.perf_counter()
    subprocess.run([*command, "--precision", precision], check=True, capture_output=True)
    seconds = time.perf_counter() - start
    split = open_data(data).for_evaluation(None)
    labels = open_data(data).labels
    classifier = vitrail.Classifier(output / "bundle")
    rows = classifier.stream(split.images, names=map(str, range(len(split))))
    predictions = [row["predictions"][0]["label"] for row in rows]
    is_correct = [predicted == labels[label] for predicted, label in zip(predictions, split.labels, strict=True)]
    return np.array(is_correct), seconds


def compare(name, arguments, data, seeds):
    """Return a row of the table: accuracies, their difference with its interval, and seconds."""
    correct, seconds = {precision: [] for precision in PRECISIONS}, {precision: [] for precision in PRECISIONS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for precision in PRECISIONS:
                is_correct, duration = train(arguments, data, precision, seed, Path(folder) / f"{precision}-{seed}")
                correct[precision].append(is_correct)
                seconds[precision].append(duration)
    exact, rounded = (np.stack(correct[precision]) for precision in PRECISIONS)
    estimate = difference(rounded, exact, pool([exact.mean(axis=1), rounded.mean(axis=1)]))
    low, high = (100 * end for end in estimate.interval())
    accuracies = [" ".join(f"{share:.2%}" for share in scores.mean(axis=1)) for scores in (exact, rounded)]
    gain = np.median(np.divide(seconds["float32"], seconds["bfloat16"]))
    return (
        f"| {name} | {' | '.join(accuracies)} | {100 * estimate.value:+.2f} ({low:+.2f} to {high:+.2f}) |"
        f" {np.mean(seconds['float32']):.0f} | {np.mean(seconds['bfloat16']):.0f} | {gain:.2f}x |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--train",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train ViT-Nano/7 on Fashion-MNIST (the first row)",
    )
    parser.add_argument("--finetune", nargs=2, metavar=("BUNDLE", "DATA"))
    options = parser.parse_args()
    print("| run | accuracy of each seed, float32 | bfloat16 | difference, points | s, float32 | s, bfloat16 | speed |")
    print("|---" * 7 + "|")
    arguments = ["train", "fashion-mnist", "--model", "ViT-Nano/7", "--epochs", str(options.epochs)]
    if options.train:
        print(compare("ViT-Nano/7 on Fashion-MNIST", arguments, "fashion-mnist", options.seeds), flush=True)
    if options.finetune:
        bundle, data = options.finetune
        # Start from a head of zeros: a head from least squares may be the best result, and would be kept unchanged.
        arguments = ["finetune", bundle, data, "--epochs", str(options.epochs), "--batch", "16", "--set", "head=zero"]
        print(compare(f"{bundle} fine-tuned on {Path(data).name}", arguments, data, options.seeds), flush=True)


if __name__ == "__main__":
    main()
