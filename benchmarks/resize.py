"""What the rule of resizing positions is worth: DeiT-Ti/16 on 500 ImageNet photos at other resolutions, not fine-tuned.

    .venv/bin/python benchmarks/resize.py                   (about 4 minutes on two cores)

For each resolution the same photos go through the same weights under each library's rule. Rules are compared on the
same photos: gains and losses are photos that this rule gets right and timm's does not, and the other way round; p is
the exact sign test of the two (McNemar's).
"""

import argparse
import math
import tempfile
from pathlib import Path

from images import SHARED
from vitrail.bundles.bundle import load
from vitrail.bundles.convert import convert
from vitrail.core.intervals import wilson_interval
from vitrail.data.loader import Loader
from vitrail.data.sources.registry import open_data
from vitrail.evaluation.labels import match_labels
from vitrail.evaluation.split_predictions import predict_split

RULES = ("timm", "huggingface", "google", "torchvision")


def sign_test(gains, losses):
    """Two-sided: how likely so uneven a split of the photos is, if both rules were equally good."""
    n, k = gains + losses, min(gains, losses)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolutions", nargs="+", type=int, default=[160, 288, 384])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        convert(str(SHARED / "deit-ti16"), Path(folder) / "deit", "vitrail", verifies=False, images=[])
        bundle = load(f"{folder}/deit")
    data = open_data(SHARED / "imagenet-val-500")
    split = data.first_split
    place, _ = match_labels(bundle.labels, 1000, data.labels)
    truth = place[split.labels]
    print("| pixels | rule | right of 500 | accuracy | 95 % interval | gains, losses beside timm's | p |")
    print("|---|---|---|---|---|---|---|")
    for size in [bundle.model.config.resolution[0], *chosen.resolutions]:
        first = None
        for rule in RULES if size != bundle.model.config.resolution[0] else ("(as trained)",):
            model = bundle.model if rule == "(as trained)" else bundle.model.resize(size, rule=rule)
            eye = bundle.preprocess.replace(resolution=model.config.resolution)
            answers = predict_split(model, Loader(split, eye, batch=50, shuffle=False))
            is_right = answers.probabilities.argmax(axis=1) == truth
            right = int(is_right.sum())
            low, high = wilson_interval(right, len(split))
            first = is_right if first is None else first
            gains, losses = int((is_right & ~first).sum()), int((first & ~is_right).sum())
            pair = ("-", "-") if is_right is first else (f"{gains}, {losses}", f"{sign_test(gains, losses):.2f}")
            cells = (size, rule, right, f"{right / len(split):.1%}", f"{low:.1%} to {high:.1%}", *pair)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
