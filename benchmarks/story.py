"""What pre-training buys: DeiT-Ti/16, frozen and fine-tuned, beside a ViT and a ResNet from scratch, on little data.

    .venv/bin/python benchmarks/story.py                    (about 45 minutes on two cores)
    .venv/bin/python benchmarks/story.py --counts 100

Data: n images of CIFAR-10 (32 px, as many of each class), judged once on 2,000 others. Weights: DeiT-Ti/16, which
were trained on 1.28 million photos of ImageNet. Every cell is one run of the command line, from an empty process to its
report, with one seed; the interval is Wilson's for 2,000 images and knows nothing of other seeds.
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
    """A name for each row, and what is typed for it."""
    allowed = ("--minutes", str(minutes), *FLIP)
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
        "DeiT-Ti/16 fine-tuned, 224 px": ("finetune", bundle, data, *allowed),
        "DeiT-Ti/16 fine-tuned, 112 px": ("finetune", bundle, data, "--resolution", "112", *allowed),
        "ViT-Micro/4 from scratch": ("train", data, "--model", "ViT-Micro/4", *allowed),
        "ResNet-Micro from scratch": ("train", data, "--model", "ResNet-Micro", *allowed),
    }


def run(words, folder):
    began = time.perf_counter()
    output = folder / "run"
    command = [sys.executable, "-m", "vitrail", *words, "--output", str(output), "--force"]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    final = next(line for line in lines if line["event"] == "final")
    epochs = json.loads((output / "bundle" / "provenance.json").read_text())["epochs"]
    return final, epochs, seconds


def subset(source, count, folder):
    """The first images of each class, as many of each."""
    with np.load(source) as arrays:
        labels = arrays["train_labels"]
        classes = len(arrays["classes"])
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == k)[: count // classes] for k in range(classes)]))
        path = folder / f"cifar10-{count}.npz"
        kept = {name: arrays[name] for name in ("classes", "test_images", "test_labels")}
        np.savez(path, train_images=arrays["train_images"][chosen], train_labels=labels[chosen], **kept)
    return str(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="only rows with these words in their names")
    parser.add_argument("--counts", nargs="+", type=int, choices=MINUTES, default=list(MINUTES))
    chosen = parser.parse_args()
    print("| n | what | epochs | seconds | right of 2,000 | accuracy | 95 % interval |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle = str(folder / "deit")
        convert = [sys.executable, "-m", "vitrail", "convert", str(SHARED / "deit-ti16"), bundle, "--no-verify"]
        subprocess.run(convert, check=True, capture_output=True)
        for count in chosen.counts:
            data = subset(SHARED / "cifar10-12k.npz", count, folder)
            for what, words in commands(bundle, data, MINUTES[count]).items():
                if chosen.rows not in what:
                    continue
                final, epochs, seconds = run(words, folder)
                low, high = final["accuracy_interval"]
                right = round(final["accuracy"] * final["count"])
                cells = (f"{count:,}", what, f"{epochs:g}", f"{seconds:.0f}", f"{right:,}", f"{final['accuracy']:.1%}")
                print("| " + " | ".join((*cells, f"{low:.1%} to {high:.1%}")) + " |", flush=True)


if __name__ == "__main__":
    main()
