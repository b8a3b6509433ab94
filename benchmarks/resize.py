"""Accuracy of DeiT-Ti/16 at other resolutions without fine-tuning, by the rule that resizes position embeddings.

    .venv/bin/python benchmarks/resize.py                   (about 4 minutes on two cores)

Each library's rule is applied to the same weights and evaluated on the same 500 ImageNet photos at each resolution.
Gains are photos that are correct with this rule and wrong with timm's, losses the reverse; p is that of the exact
sign test (McNemar's).
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
    """Return the two-sided p value of the exact sign test, for the hypothesis that both rules are equally accurate."""
    n, k = gains + losses, min(gains, losses)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolutions", nargs="+", type=int, default=[160, 288, 384])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        convert(str(SHARED / "deit-ti16"), Path(folder) / "deit", "vitrail", verifies=False, images=[])
        bundle = load(f"{folder}/deit")
    data = open_data(SHARED / "imagenet-val-500")
    split = data.first_split
    class_of_label, _ = match_labels(bundle.labels, 1000, data.labels)
    truth = class_of_label[split.labels]
    print("| pixels | rule | correct of 500 | accuracy | 95 % interval | gains, losses against timm's | p |")
    print("|---|---|---|---|---|---|---|")
    for size in [bundle.model.config.resolution[0], *options.resolutions]:
        timm_correct = None
        for rule in RULES if size != bundle.model.config.resolution[0] else ("(as trained)",):
            model = bundle.model if rule == "(as trained)" else bundle.model.resize(size, rule=rule)
            preprocess = bundle.preprocess.replace(resolution=model.config.resolution)
            predictions = predict_split(model, Loader(split, preprocess, batch=50, shuffle=False))
            is_correct = predictions.probabilities.argmax(axis=1) == truth
            correct = int(is_correct.sum())
            low, high = wilson_interval(correct, len(split))
            timm_correct = is_correct if timm_correct is None else timm_correct
            gains, losses = int((is_correct & ~timm_correct).sum()), int((timm_correct & ~is_correct).sum())
            pair = (
                ("-", "-") if is_correct is timm_correct else (f"{gains}, {losses}", f"{sign_test(gains, losses):.2f}")
            )
            cells = (size, rule, correct, f"{correct / len(split):.1%}", f"{low:.1%} to {high:.1%}", *pair)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
