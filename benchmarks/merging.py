"""Accuracy and speed of token merging for DeiT-Ti/16, and the speed of ViT-S/16.

    vitrail convert $VITRAIL_SHARED/data/deit-ti16/model.safetensors deit
    .venv/bin/python benchmarks/merging.py deit $VITRAIL_SHARED/data/imagenet-val-500 --curve curve.json

The search uses a random half of the photos. It compares predictions with and without merging and needs no labels. The
table is computed on the other half. With `--curve`, the result of the search is saved to a file and reused. Speeds
are ratios to the model without merging, alternating in one process: medians of the rounds' ratios of CPU time, so
that other programs on the machine have little influence. ViT-S/16 has random weights, so only its speed is measured.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch

import vitrail
from vitrail.core.intervals import wilson_interval
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.merge_search import MergeCost, MergeEvaluator, count_macs, find_merge, with_merge
from vitrail.inference.engine import import_engine_package
from vitrail.lab.exact import redraw
from vitrail.models.layers import separate_

UNIFORM = (8,) * 12  # the usual choice in publications: the same number in each layer


def split_photos(bundle, data):
    """Return the crops of the photos for the search, and the crops and labels of the other photos."""
    split = open_data(data).for_evaluation(None)
    order = np.random.default_rng(0).permutation(len(split))
    search_indices, test_indices = (np.sort(part) for part in np.array_split(order, 2))
    crops = [
        np.stack([bundle.preprocess.crop(split.images[i]) for i in part]) for part in (search_indices, test_indices)
    ]
    return *crops, np.array([int(open_data(data).labels[split.labels[i]]) for i in test_indices])


def search(bundle, crops, tolerance, path):
    """Return the curve of the search. It is read from the file `path` if that exists, and otherwise written to it."""
    if path is not None and path.exists():
        rows = json.loads(path.read_text())
        return [
            MergeCost(**{name: row[name] for name in MergeCost._fields} | {"merge": tuple(row["merge"])})
            for row in rows
        ]
    curve = find_merge(bundle, crops, tolerance, tell=partial(print, file=sys.stderr, flush=True))
    if path is not None:
        path.write_text(json.dumps([cost.to_json() for cost in curve]))
    return curve


def open_session(model, batch):
    """Return a function from batches of this size to logits that runs the graph of our engine in ONNX Runtime."""
    runtime, model = import_engine_package("onnxruntime", "onnx"), copy.deepcopy(model)
    separate_(model)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        names = {"input_names": ["images"], "output_names": ["logits"]}
        example = torch.zeros(batch, 3, *model.config.resolution)
        torch.onnx.export(model, (example,), path, **names, opset_version=20, verbose=False, external_data=False)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = runtime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images.numpy()})[0]


def measure_speedups(runs, rounds):
    """Return how many times faster each function is than the first: the median over rounds of ratios of CPU time."""
    seconds = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    first = seconds[next(iter(runs))][1:]
    return {name: statistics.median(map(lambda a, b: a / b, first, times[1:])) for name, times in seconds.items()}


def race_merges(model, merges, batches, rounds):
    """Return the speedup of each merge over the first, by engine and batch."""
    speedups = {}
    with torch.inference_mode():
        for batch in batches:
            images = torch.randn(batch, 3, *model.config.resolution)
            models = {merge: with_merge(model, merge).eval() for merge in merges}
            with torch.inference_mode(False):
                sessions = {merge: open_session(merged, batch) for merge, merged in models.items()}
            for engine, functions in (("torch", models), ("onnx", sessions)):
                runs = {merge: partial(run, images) for merge, run in functions.items()}
                speedups[engine, batch] = measure_speedups(runs, rounds)
    return speedups


def compare_with_onnx(bundle, crops, merge):
    """Return for how many images ONNX Runtime and torch agree in the prediction and in all logits within rounding.

    The last value is the number of images.
    """
    model = with_merge(bundle.model, merge).eval()
    run = open_session(model, 10)
    pieces = [bundle.preprocess.scale(torch.from_numpy(crops[i : i + 10])) for i in range(0, len(crops) - 9, 10)]
    with torch.inference_mode():
        ours = torch.cat([model(piece) for piece in pieces]).numpy()
    theirs = np.concatenate([run(piece) for piece in pieces])
    gaps = np.abs(ours - theirs).max(axis=1)
    return (ours.argmax(1) == theirs.argmax(1)).sum(), (gaps < 1e-4 * np.abs(ours).max()).sum(), len(ours)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("data")
    parser.add_argument("--tolerance", type=float, default=0.04)
    parser.add_argument("--curve", type=Path)
    parser.add_argument("--only-search", action="store_true")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="*", default=[4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bundle = vitrail.load(arguments.bundle)
    search_crops, test_crops, labels = split_photos(bundle, arguments.data)
    curve = search(bundle, search_crops, arguments.tolerance, arguments.curve)
    if arguments.only_search:
        return
    unmerged, evaluator = curve[0], MergeEvaluator(bundle, test_crops)
    unmerged_predictions = evaluator.predict(unmerged.merge)
    search_share = {cost.merge: cost.share for cost in curve}
    rows = np.linspace(0, len(curve) - 1, min(arguments.rows, len(curve))).round().astype(int)
    merges = [*(curve[row].merge for row in rows), UNIFORM]
    speedups = race_merges(bundle.model, merges, arguments.batches, arguments.rounds)
    columns = [f"{engine}, batch {batch}" for engine, batch in speedups]
    print(
        "| tokens merged before layer | MACs | predictions changed, search photos | test photos |"
        " correct, test photos | " + " | ".join(columns)
    )
    print("|---" * (5 + len(columns)) + "|")
    for merge in merges:
        predictions = evaluator.predict(merge)
        changed, count = int((predictions != unmerged_predictions).sum()), len(predictions)
        low, high = wilson_interval(changed, count)
        searched = f"{search_share[merge]:.1%}" if merge in search_share else ""
        merged_tokens = ", ".join(f"{layer}: {count}" for layer, count in enumerate(merge) if count) or "none"
        cells = [
            merged_tokens,
            f"{unmerged.macs / count_macs(with_merge(bundle.model, merge).config):.2f}x fewer",
            searched,
        ]
        cells += [f"{changed / count:.1%} ({low:.1%} to {high:.1%})", f"{(predictions == labels).sum()} of {count}"]
        print(f"| {' | '.join(cells + [f'{speedup[merge]:.2f}x' for speedup in speedups.values()])} |", flush=True)
    equal, close, count = compare_with_onnx(bundle, test_crops, curve[-1].merge)
    print(f"\nONNX Runtime: {equal} of {count} predictions equal torch's, {close} with all logits within rounding\n")
    model = redraw(vitrail.create("ViT-S/16"), std=0.02)
    for (engine, batch), speedup in race_merges(
        model, merges[:1] + merges[-2:], arguments.batches, arguments.rounds
    ).items():
        last_speedups = ", ".join(f"{speedup[merge]:.2f}x" for merge in merges[-2:])
        print(f"ViT-S/16, {engine}, batch {batch}: {last_speedups} (the last two rows of the table)")


if __name__ == "__main__":
    main()
