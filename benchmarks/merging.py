"""Token merging: what it changes and how much faster it is, for DeiT-Ti/16; and the speed of ViT-S/16.

    vitrail convert $VITRAIL_SHARED/data/deit-ti16/model.safetensors deit
    .venv/bin/python benchmarks/merging.py deit $VITRAIL_SHARED/data/imagenet-val-500 --curve curve.json

Half of the photos, drawn by a seed, are for the search, which compares answers with and without merging and needs no
labels; the table is about the other half. With `--curve`, the search is done once and its result kept. Speeds are
ratios to the model without merging, in turn in one process: the median of the rounds' ratios of CPU time, so that other
programs on the machine matter little. ViT-S/16 has random weights, whose answers mean nothing, so only its speed is
measured.
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

UNIFORM = (8,) * 12  # what token merging is usually given


def halves(bundle, data):
    """Crops of the photos for the search, and crops and labels of the others."""
    split = open_data(data).for_evaluation(None)
    order = np.random.default_rng(0).permutation(len(split))
    known, unseen = (np.sort(part) for part in np.array_split(order, 2))
    crops = [np.stack([bundle.preprocess.crop(split.images[i]) for i in part]) for part in (known, unseen)]
    return *crops, np.array([int(open_data(data).labels[split.labels[i]]) for i in unseen])


def search(bundle, crops, tolerance, path):
    """The curve of the search, from a file if it was made before."""
    if path is not None and path.exists():
        rows = json.loads(path.read_text())
        return [
            MergeCost(**{name: row[name] for name in MergeCost._fields} | {"merge": tuple(row["merge"])})
            for row in rows
        ]
    curve = find_merge(bundle, crops, tolerance, tell=partial(print, file=sys.stderr, flush=True))
    if path is not None:
        path.write_text(json.dumps([price.to_json() for price in curve]))
    return curve


def session(model, batch):
    """A function from images (an array of that batch) to logits, by ONNX Runtime, with the graph of our engine."""
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
        made = runtime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    return lambda images: made.run(None, {"images": images.numpy()})[0]


def ratios(runs, rounds):
    """How many times faster each run is than the first, by the median over rounds."""
    seconds = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    first = seconds[next(iter(runs))][1:]
    return {name: statistics.median(map(lambda a, b: a / b, first, each[1:])) for name, each in seconds.items()}


def speeds(model, merges, batches, rounds):
    """Ratios by engine and batch, then by merge."""
    found = {}
    with torch.inference_mode():
        for batch in batches:
            images = torch.randn(batch, 3, *model.config.resolution)
            models = {merge: with_merge(model, merge).eval() for merge in merges}
            with torch.inference_mode(False):
                graphs = {merge: session(one, batch) for merge, one in models.items()}
            for engine, made in (("torch", models), ("onnx", graphs)):
                runs = {merge: partial(run, images) for merge, run in made.items()}
                found[engine, batch] = ratios(runs, rounds)
    return found


def same_in_onnx(bundle, crops, merge):
    """How many answers ONNX Runtime gives as torch does, and the share of images whose logits agree within rounding."""
    model = with_merge(bundle.model, merge).eval()
    run = session(model, 10)
    pieces = [bundle.preprocess.scale(torch.from_numpy(crops[at : at + 10])) for at in range(0, len(crops) - 9, 10)]
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
    known, unseen, labels = halves(bundle, arguments.data)
    curve = search(bundle, known, arguments.tolerance, arguments.curve)
    if arguments.only_search:
        return
    plain, judge = curve[0], MergeEvaluator(bundle, unseen)
    plain_answers = judge.answers(plain.merge)
    known_share = {price.merge: price.share for price in curve}
    rows = np.linspace(0, len(curve) - 1, min(arguments.rows, len(curve))).round().astype(int)
    merges = [*(curve[row].merge for row in rows), UNIFORM]
    measured = speeds(bundle.model, merges, arguments.batches, arguments.rounds)
    columns = [f"{engine}, batch {batch}" for engine, batch in measured]
    print(
        "| merge in front of layer | MACs | answers changed, searched | unseen | right, unseen | " + " | ".join(columns)
    )
    print("|---" * (5 + len(columns)) + "|")
    for merge in merges:
        answers = judge.answers(merge)
        changed, count = int((answers != plain_answers).sum()), len(answers)
        low, high = wilson_interval(changed, count)
        searched = f"{known_share[merge]:.1%}" if merge in known_share else ""
        shown = ", ".join(f"{layer}: {count}" for layer, count in enumerate(merge) if count) or "none"
        cells = [shown, f"{plain.macs / count_macs(with_merge(bundle.model, merge).config):.2f}x fewer", searched]
        cells += [f"{changed / count:.1%} ({low:.1%} to {high:.1%})", f"{(answers == labels).sum()} of {count}"]
        print(f"| {' | '.join(cells + [f'{by[merge]:.2f}x' for by in measured.values()])} |", flush=True)
    alike, within, count = same_in_onnx(bundle, unseen, curve[-1].merge)
    print(f"\nONNX Runtime: {alike} of {count} answers as torch's, {within} with all logits within rounding\n")
    model = redraw(vitrail.create("ViT-S/16"), std=0.02)
    for (engine, batch), by in speeds(model, merges[:1] + merges[-2:], arguments.batches, arguments.rounds).items():
        shown = ", ".join(f"{by[merge]:.2f}x" for merge in merges[-2:])
        print(f"ViT-S/16, {engine}, batch {batch}: {shown} (the last two rows of the table)")


if __name__ == "__main__":
    main()
