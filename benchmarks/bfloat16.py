"""What training in bfloat16 changes: accuracy and seconds beside float32, over seeds, by the command line.

    vitrail convert $VITRAIL_SHARED/data/deit-ti16/model.safetensors deit
    .venv/bin/python benchmarks/bfloat16.py --finetune deit $VITRAIL_SHARED/data/hymenoptera

Every run is a process of its own, precisions in turn; it trains for a fixed number of epochs.
Each model answers the test images once. The interval of the difference holds for other seeds and other test images.
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


def train(words, data, precision, seed, output):
    """One run; whether each answer to the images for evaluation is right, and the seconds of its steps."""
    command = [sys.executable, "-m", "vitrail", *words, "--output", str(output), "--seed", str(seed)]
    began = time.perf_counter()
    subprocess.run([*command, "--precision", precision], check=True, capture_output=True)
    seconds = time.perf_counter() - began
    split = open_data(data).for_evaluation(None)
    labels = open_data(data).labels
    bundle = vitrail.Classifier(output / "bundle")
    answers = [one["predictions"][0]["label"] for one in bundle.stream(split.images, names=map(str, range(len(split))))]
    return np.array([answer == labels[label] for answer, label in zip(answers, split.labels, strict=True)]), seconds


def compare(name, words, data, seeds):
    """A row of the table."""
    right, seconds = {precision: [] for precision in PRECISIONS}, {precision: [] for precision in PRECISIONS}
    with tempfile.TemporaryDirectory() as place:
        for seed in range(seeds):
            for precision in PRECISIONS:
                found = train(words, data, precision, seed, Path(place) / f"{precision}-{seed}")
                for kept, one in zip((right, seconds), found, strict=True):
                    kept[precision].append(one)
    exact, rounded = (np.stack(right[precision]) for precision in PRECISIONS)
    found = difference(rounded, exact, pool([exact.mean(axis=1), rounded.mean(axis=1)]))
    low, high = (100 * end for end in found.interval())
    accuracies = [" ".join(f"{share:.2%}" for share in some.mean(axis=1)) for some in (exact, rounded)]
    gain = np.median(np.divide(seconds["float32"], seconds["bfloat16"]))
    return (
        f"| {name} | {' | '.join(accuracies)} | {100 * found.value:+.2f} ({low:+.2f} to {high:+.2f}) |"
        f" {np.mean(seconds['float32']):.0f} | {np.mean(seconds['bfloat16']):.0f} | {gain:.2f}x |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--train", action=argparse.BooleanOptionalAction, default=True, help="the first row")
    parser.add_argument("--finetune", nargs=2, metavar=("BUNDLE", "DATA"))
    options = parser.parse_args()
    print("| run | accuracy of each seed, float32 | bfloat16 | difference, points | s, float32 | s, bfloat16 | speed |")
    print("|---" * 7 + "|")
    words = ["train", "fashion-mnist", "--model", "ViT-Nano/7", "--epochs", str(options.epochs)]
    if options.train:
        print(compare("ViT-Nano/7 on Fashion-MNIST", words, "fashion-mnist", options.seeds), flush=True)
    if options.finetune:
        bundle, data = options.finetune
        # A head that begins at zero: one from least squares may be as good as all that follows, and be kept.
        words = ["finetune", bundle, data, "--epochs", str(options.epochs), "--batch", "16", "--set", "head=zero"]
        print(compare(f"{bundle} fine-tuned on {Path(data).name}", words, data, options.seeds), flush=True)


if __name__ == "__main__":
    main()
