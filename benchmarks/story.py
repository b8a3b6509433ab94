"""Benefit of pre-training with little data: DeiT-Ti/16, frozen and fine-tuned, and a ViT and a ResNet from scratch.

    .venv/bin/python benchmarks/story.py                    (about 45 minutes on two cores)
    .venv/bin/python benchmarks/story.py --counts 100

The training data are n images of CIFAR-10 (32 px, equally many of each class); 2,000 other images are predicted once.
DeiT-Ti/16 was pre-trained on 1.28 million photos of ImageNet. Each row is one run of the command line with one seed,
and the time is that of the whole process. The interval is Wilson's for 2,000 images and does not cover other seeds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from images import SHARED

MINUTES = {100: 1, 1_000: 3, 10_000: 5}
FLIP = ("--set", "augment.flip=random", "holdout=0")


def commands(bundle, data, minutes):
    """Return the arguments of the command of each row, by name."""
    limits = ("--minutes", str(minutes), *FLIP)
    return {
        "DeiT-Ti/16 frozen, 224 px": ("finetune", bundle, data, "--recipe", "frozen", "--set", "holdout=0"),
        "DeiT-Ti/16 frozen, 112 px": (
            "finetune",
            bundle,
            data,
            "--recipe",
            "frozen",
            "--resolution",
            "112",
            "--set",
            "holdout=0",
        ),
        "DeiT-Ti/16 fine-tuned, 224 px": ("finetune", bundle, data, *limits),
        "DeiT-Ti/16 fine-tuned, 112 px": ("finetune", bundle, data, "--resolution", "112", *limits),
        "ViT-Micro/4 from scratch": ("train", data, "--model", "ViT-Micro/4", *limits),
        "ResNet-Micro from scratch": ("train", data, "--model", "ResNet-Micro", *limits),
    }


def run_command(arguments, folder):
    """Run a training command. Return its final event, the epochs and the seconds."""
    start = time.perf_counter()
    output = folder / "run"
    command = [sys.executable, "-m", "vitrail", *arguments, "--output", str(output), "--force"]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    final = next(line for line in lines if line["event"] == "final")
    epochs = json.loads((output / "bundle" / "provenance.json").read_text())["epochs"]
    return final, epochs, seconds


def write_subset(source, count, folder):
    """Write the first images of each class, equally many of each, and return the path of the file."""
    with np.load(source) as arrays:
        labels = arrays["train_labels"]
        classes = len(arrays["classes"])
        indices = np.sort(np.concatenate([np.flatnonzero(labels == k)[: count // classes] for k in range(classes)]))
        path = folder / f"cifar10-{count}.npz"
        unchanged = {name: arrays[name] for name in ("classes", "test_images", "test_labels")}
        np.savez(path, train_images=arrays["train_images"][indices], train_labels=labels[indices], **unchanged)
    return str(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows whose names contain this text")
    parser.add_argument("--counts", nargs="+", type=int, choices=MINUTES, default=list(MINUTES))
    options = parser.parse_args()
    print("| n | run | epochs | seconds | correct of 2,000 | accuracy | 95 % interval |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bundle = str(folder / "deit")
        convert = [sys.executable, "-m", "vitrail", "convert", str(SHARED / "deit-ti16"), bundle, "--no-verify"]
        subprocess.run(convert, check=True, capture_output=True)
        for count in options.counts:
            data = write_subset(SHARED / "cifar10-12k.npz", count, folder)
            for name, arguments in commands(bundle, data, MINUTES[count]).items():
                if options.rows not in name:
                    continue
                final, epochs, seconds = run_command(arguments, folder)
                low, high = final["accuracy_interval"]
                correct = round(final["accuracy"] * final["count"])
                cells = (
                    f"{count:,}",
                    name,
                    f"{epochs:g}",
                    f"{seconds:.0f}",
                    f"{correct:,}",
                    f"{final['accuracy']:.1%}",
                )
                print("| " + " | ".join((*cells, f"{low:.1%} to {high:.1%}")) + " |", flush=True)


if __name__ == "__main__":
    main()
