"""Gain of fine-tuning with the default recipe over a linear head on frozen features.

    .venv/bin/python benchmarks/finetune.py OUTPUT                 (hours on two cores; the same command resumes)
    .venv/bin/python benchmarks/finetune.py OUTPUT --lengths 3-epochs --data hymenoptera
    .venv/bin/python benchmarks/finetune.py OUTPUT --report         (only print the table of finished runs)

DeiT-Ti/16 is fine-tuned on eight sets of images, with three seeds and three lengths. The last two sets (birds or
dogs, ships or frogs) are easy: their linear head is nearly perfect, and they were not used to choose the recipe or
its rule for ties. The default recipe holds out a tenth of the training images to choose between the linear head and
the fine-tuned model; scores are computed on other images. The recipe was options on the other half of CIFAR-10's test
images, on other test images of Fashion-MNIST, and on other splits of the photos. A length in minutes is converted to
a number of steps (`STEPS_PER_MINUTE`), so that the benchmark can run beside other work.
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
from vitrail.evaluation.predictions.saved_predictions import PREDICTIONS_FILE, SavedPredictions

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
LARGE_SET = 800  # training images of a large set: a tenth of 1,000 images is held out
# Numbers of the ImageNet classes of each group.
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
    """Link photos into class folders; `photos` are pairs of a folder such as train/ants and a file."""
    for class_folder, photo in photos:
        (folder / class_folder).mkdir(parents=True, exist_ok=True)
        if not (folder / class_folder / photo.name).exists():
            (folder / class_folder / photo.name).symlink_to(photo)
    return folder


def split_alternately(photos, class_of):
    """Return pairs of a class folder and a photo, which assign photos to train and test in turn."""
    return [(f"{('train', 'test')[index % 2]}/{class_of(photo)}", photo) for index, photo in enumerate(photos)]


def select_balanced(labels, count):
    """Return the indices of the first images of each class, equally many of each, `count` in total."""
    classes = np.unique(labels)
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[: count // len(classes)] for label in classes]))


def write_arrays(path, train, test):
    """Write an .npz file with a train and a test split, unless it exists."""
    if not path.exists():
        names = ("train_images", "train_labels", "test_images", "test_labels")
        np.savez(path, **dict(zip(names, (*train, *test), strict=True)))
    return path


def prepare_data(name, folder):
    """Write the data set of this name, with a train and a test split, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "hymenoptera":
        photos = sorted((SHARED / "hymenoptera").glob("*/*/*"), key=lambda photo: (photo.parent.name, photo.name))
        return link_photos(folder / name, split_alternately(photos, lambda photo: photo.parent.name))
    if name in PHOTO_GROUPS:
        pairs = []
        for group in PHOTO_GROUPS[name]:
            numbers = GROUPS[group]
            class_folders = [SHARED / f"imagenet-val-500/{number:03}" for number in numbers]
            photos = [photo for class_folder in class_folders for photo in sorted(class_folder.glob("*"))]
            pairs += split_alternately(photos, lambda _, group=group: group)
        return link_photos(folder / name, pairs)
    if name == "fashion":
        splits = open_data("fashion-mnist").splits
        train, test = splits["train"], splits["test"]
        train_indices = select_balanced(train.labels, 6_000)
        unused = np.setdiff1d(np.arange(len(test)), select_balanced(test.labels, 2_000))
        test_indices = unused[select_balanced(test.labels[unused], 2_000)]
        return write_arrays(
            folder / "fashion.npz",
            (train.images[train_indices], train.labels[train_indices]),
            (test.images[test_indices], test.labels[test_indices]),
        )
    with np.load(SHARED / "cifar10-12k.npz") as arrays:
        labels, test_labels = arrays["train_labels"], arrays["test_labels"]
        half = np.linspace(0, len(test_labels) - 1, len(test_labels) // 2).round()
        test_indices = np.setdiff1d(np.arange(len(test_labels)), half)
        if name == "ships-frogs":
            train_indices = np.flatnonzero(np.isin(labels, (FROG, SHIP)))[:300]
            test_indices = test_indices[np.isin(test_labels[test_indices], (FROG, SHIP))]
        else:
            train_indices = select_balanced(labels, int(name.removeprefix("cifar-")))
        train = arrays["train_images"][train_indices], labels[train_indices]
        test = arrays["test_images"][test_indices], test_labels[test_indices]
        return write_arrays(folder / f"{name}.npz", train, test)


def length_settings(length, resolution):
    """Return the arguments of `finetune` for a length such as 3-epochs or 5-minutes."""
    number, unit = length.split("-")
    return {"epochs": int(number)} if unit == "epochs" else {"steps": int(number) * STEPS_PER_MINUTE[resolution]}


def finetune(bundle, data, resolution, seed, options, **settings):
    """Fine-tune a bundle. Return the events of the run, and whether each test image is predicted correctly."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        result = vitrail.finetune(
            bundle,
            str(data),
            output=output,
            seed=seed,
            resolution=resolution,
            precision=options.precision,
            threads=options.threads,
            quiet=True,
            **settings,
        )
        return result.history, SavedPredictions.read(output / PREDICTIONS_FILE).right


def measure(bundle, name, length, seed, options):
    """Return a row of results: test accuracy of the linear head and of the kept model, and which was kept."""
    resolution, data = RESOLUTIONS[name], prepare_data(name, options.output / "data")
    head = options.output / f"head-{name}-{seed}.npy"
    if not head.exists():
        np.save(head, finetune(bundle, data, resolution, seed, options, recipe="frozen")[1])
    before = np.load(head)
    events, after = finetune(
        bundle, data, resolution, seed, options, settings=options.set, **length_settings(length, resolution)
    )
    (choice,) = (event for event in events if event["event"] == "choice")
    (probe,) = (event for event in events if event["event"] == "probe")
    return {
        "data": name,
        "settings": options.set,
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
    """Return the mean and the ends of its 95 % interval by Student's t."""
    mean = statistics.mean(numbers)
    if len(numbers) < 2:
        return mean, math.nan, math.nan
    half = float(student.ppf(0.975, len(numbers) - 1)) * statistics.stdev(numbers) / math.sqrt(len(numbers))
    return mean, mean - half, mean + half


def print_report(rows):
    """Print a table with a row for each set of images and length, and a summary of the gains."""
    cells = collections.defaultdict(list)
    for row in rows:
        row["gain"] = 100 * (row["after"] - row["head"]) / row["test_images"]
        cells[row["data"], row["length"]].append(row)
    print(
        "| images | training images | length | steps | linear head | kept model | gain, points | lowest | kept head |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (data, length), runs in cells.items():
        head, after = (statistics.mean(row[key] / row["test_images"] for row in runs) for key in ("head", "after"))
        mean, low, high = interval([row["gain"] for row in runs])
        lowest, heads = min(row["gain"] for row in runs), sum(row["kept"] == "start" for row in runs)
        print(
            f"| {data} | {runs[0]['training_images']:,} | {length} | {runs[0]['steps']} | {head:.1%} | {after:.1%}"
            f" | {mean:+.1f} ({low:+.1f} to {high:+.1f}) | {lowest:+.1f} | {heads} of {len(runs)} |"
        )
    gains = [row["gain"] for row in rows]
    large_gains = [
        statistics.mean(row["gain"] for row in runs)
        for runs in cells.values()
        if runs[0]["training_images"] > LARGE_SET
    ]
    print(f"\nat least as good as the head: {sum(gain >= 0 for gain in gains)} of {len(gains)} runs")
    if large_gains:
        mean, low, high = interval(large_gains)
        print(
            f"mean gain with 1,000 images or more, {len(large_gains)} rows: {mean:+.1f} points ({low:+.1f} to"
            f" {high:+.1f})"
        )
    print(f"lowest gain of a run: {min(gains):+.1f} points")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", nargs="+", choices=RESOLUTIONS, default=list(RESOLUTIONS))
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--set", nargs="+", default=[], help="settings that differ from the default recipe")
    parser.add_argument("--precision", default="float32", help="bfloat16 is faster on CPUs that support it")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--report", action="store_true", help="only print the table")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    results = options.output / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if options.threads:
        torch.set_num_threads(options.threads)
    bundle = options.output / "deit"
    if not bundle.exists():
        convert = [sys.executable, "-m", "vitrail", "convert", str(SHARED / "deit-ti16"), str(bundle), "--no-verify"]
        subprocess.run(convert, check=True, capture_output=True)
    rows = [row for row in rows if row.get("settings", []) == options.set]
    done = {(row["data"], row["length"], row["seed"]) for row in rows}
    for length in () if options.report else options.lengths:
        for name in options.data:
            for seed in options.seeds:
                if (name, length, seed) not in done:
                    row = measure(bundle, name, length, seed, options)
                    rows.append(row)
                    with results.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    print_report(rows)


if __name__ == "__main__":
    main()
