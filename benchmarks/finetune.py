"""Does fine-tuning with the default recipe help? The kept model beside its own linear head on frozen features.

    .venv/bin/python benchmarks/finetune.py OUTPUT                 (hours on two cores; the same command resumes)
    .venv/bin/python benchmarks/finetune.py OUTPUT --lengths 3-epochs --data hymenoptera
    .venv/bin/python benchmarks/finetune.py OUTPUT --report         (the table of what is there)

Eight sets of images, DeiT-Ti/16, three seeds, three lengths. The last two (birds or dogs, ships or frogs) are easy:
they test the case of a head that is nearly right, on images that played no part in choosing the recipe or its tie rule.
The default recipe holds out a tenth of the training images,
which choose between the linear head and the fine-tuned model; scores are of other images. The recipe itself was chosen
on the other half of CIFAR-10's test images, on other test images of Fashion-MNIST, and on other splits of the photos.
A length in minutes is given as a number of steps (`STEPS_PER_MINUTE`), estimated from the speed of one thread, so that
the benchmark can run beside other work.
"""

import argparse
import collections
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from scipy.stats import t as student

import vitrail
from images import SHARED
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.predictions.saved_predictions import PREDICTIONS_FILE as ANSWERS
from vitrail.evaluation.predictions.saved_predictions import SavedPredictions

SEEDS = (0, 1, 2)
LENGTHS = ("3-epochs", "1-minute", "5-minutes")
STEPS_PER_MINUTE = {224: 15, 112: 60}  # steps of 64 images, DeiT-Ti/16, float32, two cores with AVX-512
RESOLUTIONS = {
    "hymenoptera": 224,
    "groups": 224,
    "cifar-100": 112,
    "cifar-1000": 112,
    "cifar-10000": 112,
    "fashion": 112,
    "birds-dogs": 224,
    "ships-frogs": 112,
}
MANY = 800  # of 1,000 images, a tenth is held out
# Classes of ImageNet, by their numbers, that make up a group.
GROUPS = {
    "birds": [*range(7, 25), *range(80, 101), *range(127, 147)],
    "dogs": [*range(151, 269)],
    "food": [*range(924, 970)],
    "insects": [*range(300, 327)],
    "mammals": [*range(269, 300), *range(330, 389)],
    "reptiles": [*range(25, 69)],
}
PHOTO_GROUPS = {"groups": tuple(GROUPS), "birds-dogs": ("birds", "dogs")}
FROG, SHIP = 6, 8  # classes of CIFAR-10


def link_photos(folder, photos):
    """Write a class folder of links; `photos` are pairs of a place (train/ants) and a file."""
    for place, photo in photos:
        (folder / place).mkdir(parents=True, exist_ok=True)
        if not (folder / place / photo.name).exists():
            (folder / place / photo.name).symlink_to(photo)
    return folder


def alternate(photos, class_of):
    """Every other photo to train on, the others to test."""
    return [(f"{('train', 'test')[at % 2]}/{class_of(photo)}", photo) for at, photo in enumerate(photos)]


def balanced(labels, count):
    """The first images of each class, as many of each, `count` in all."""
    classes = np.unique(labels)
    return np.sort(np.concatenate([np.flatnonzero(labels == one)[: count // len(classes)] for one in classes]))


def write_arrays(path, train, test):
    if not path.exists():
        names = ("train_images", "train_labels", "test_images", "test_labels")
        np.savez(path, **dict(zip(names, (*train, *test), strict=True)))
    return path


def prepare(name, folder):
    """The data of this name, with a train and a test split."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "hymenoptera":
        photos = sorted((SHARED / "hymenoptera").glob("*/*/*"), key=lambda photo: (photo.parent.name, photo.name))
        return link_photos(folder / name, alternate(photos, lambda photo: photo.parent.name))
    if name in PHOTO_GROUPS:
        pairs = []
        for group in PHOTO_GROUPS[name]:
            numbers = GROUPS[group]
            photos = [photo for one in numbers for photo in sorted((SHARED / f"imagenet-val-500/{one:03}").glob("*"))]
            pairs += alternate(photos, lambda _, group=group: group)
        return link_photos(folder / name, pairs)
    if name == "fashion":
        splits = open_data("fashion-mnist").splits
        train, test = splits["train"], splits["test"]
        at, rest = balanced(train.labels, 6_000), np.setdiff1d(np.arange(len(test)), balanced(test.labels, 2_000))
        rest = rest[balanced(test.labels[rest], 2_000)]
        return write_arrays(
            folder / "fashion.npz", (train.images[at], train.labels[at]), (test.images[rest], test.labels[rest])
        )
    with np.load(SHARED / "cifar10-12k.npz") as arrays:
        labels, test_labels = arrays["train_labels"], arrays["test_labels"]
        half = np.linspace(0, len(test_labels) - 1, len(test_labels) // 2).round()
        rest = np.setdiff1d(np.arange(len(test_labels)), half)
        if name == "ships-frogs":
            at = np.flatnonzero(np.isin(labels, (FROG, SHIP)))[:300]
            rest = rest[np.isin(test_labels[rest], (FROG, SHIP))]
        else:
            at = balanced(labels, int(name.removeprefix("cifar-")))
        train, test = (arrays["train_images"][at], labels[at]), (arrays["test_images"][rest], test_labels[rest])
        return write_arrays(folder / f"{name}.npz", train, test)


def length_of(length, resolution):
    number, unit = length.split("-")
    return {"epochs": int(number)} if unit == "epochs" else {"steps": int(number) * STEPS_PER_MINUTE[resolution]}


def run(bundle, data, resolution, seed, chosen, **settings):
    """Fine-tune; returns the events of the run and whether each test image is predicted correctly."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        result = vitrail.finetune(
            bundle,
            str(data),
            output=output,
            seed=seed,
            resolution=resolution,
            precision=chosen.precision,
            threads=chosen.threads,
            quiet=True,
            **settings,
        )
        return result.history, SavedPredictions.read(output / ANSWERS).right


def measure(bundle, name, length, seed, chosen):
    """One cell: test accuracy of the linear head, of the kept model, and what was kept."""
    resolution, data = RESOLUTIONS[name], prepare(name, chosen.output / "data")
    head = chosen.output / f"head-{name}-{seed}.npy"
    if not head.exists():
        np.save(head, run(bundle, data, resolution, seed, chosen, recipe="frozen")[1])
    before = np.load(head)
    events, after = run(bundle, data, resolution, seed, chosen, settings=chosen.set, **length_of(length, resolution))
    (choice,) = (event for event in events if event["event"] == "choice")
    (probe,) = (event for event in events if event["event"] == "probe")
    return {
        "data": name,
        "settings": chosen.set,
        "length": length,
        "seed": seed,
        "steps": max(event.get("step", 0) for event in events),
        "training_images": probe["count"],
        "residual": probe["residual"],
        "kept": choice["kept"],
        "test_images": len(after),
        "head": int(before.sum()),
        "after": int(after.sum()),
        "only_head": int((before & ~after).sum()),
        "only_after": int((after & ~before).sum()),
    }


def interval(numbers):
    """Mean and 95 % interval by Student's t."""
    mean = statistics.mean(numbers)
    if len(numbers) < 2:
        return mean, math.nan, math.nan
    half = float(student.ppf(0.975, len(numbers) - 1)) * statistics.stdev(numbers) / math.sqrt(len(numbers))
    return mean, mean - half, mean + half


def report(rows):
    """Print a line for each set of images and length, and the rules that the default must keep."""
    cells = collections.defaultdict(list)
    for row in rows:
        row["gain"] = 100 * (row["after"] - row["head"]) / row["test_images"]
        cells[row["data"], row["length"]].append(row)
    print("| images | training images | length | steps | linear head | kept model | gain, points | least | kept head |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (data, length), found in cells.items():
        head, after = (statistics.mean(row[key] / row["test_images"] for row in found) for key in ("head", "after"))
        mean, low, high = interval([row["gain"] for row in found])
        least, kept = min(row["gain"] for row in found), sum(row["kept"] == "start" for row in found)
        print(
            f"| {data} | {found[0]['training_images']:,} | {length} | {found[0]['steps']} | {head:.1%} | {after:.1%}"
            f" | {mean:+.1f} ({low:+.1f} to {high:+.1f}) | {least:+.1f} | {kept} of {len(found)} |"
        )
    gains = [row["gain"] for row in rows]
    many = [
        statistics.mean(row["gain"] for row in found) for found in cells.values() if found[0]["training_images"] > MANY
    ]
    print(f"\nat least as good as the head: {sum(gain >= 0 for gain in gains)} of {len(gains)} cells")
    if many:
        mean, low, high = interval(many)
        print(f"mean gain with 1,000 images or more, {len(many)} rows: {mean:+.1f} points ({low:+.1f} to {high:+.1f})")
    print(f"least gain of a cell: {min(gains):+.1f} points")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", nargs="+", choices=RESOLUTIONS, default=list(RESOLUTIONS))
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--set", nargs="+", default=[], help="settings that differ from the default recipe")
    parser.add_argument("--precision", default="float32", help="bfloat16 saves time where the CPU has it")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--report", action="store_true", help="only print the table")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    results = chosen.output / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    bundle = chosen.output / "deit"
    if not bundle.exists():
        convert = [sys.executable, "-m", "vitrail", "convert", str(SHARED / "deit-ti16"), str(bundle), "--no-verify"]
        subprocess.run(convert, check=True, capture_output=True)
    rows = [row for row in rows if row.get("settings", []) == chosen.set]
    done = {(row["data"], row["length"], row["seed"]) for row in rows}
    for length in () if chosen.report else chosen.lengths:
        for name in chosen.data:
            for seed in chosen.seeds:
                if (name, length, seed) not in done:
                    row = measure(bundle, name, length, seed, chosen)
                    rows.append(row)
                    with results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    report(rows)


if __name__ == "__main__":
    main()
