"""Face verification by principal components of pixels: the baseline for face models.

    .venv/bin/python benchmarks/eigenfaces.py DATA PEOPLE.txt

PEOPLE.txt names the people to train on, one name per line, as for `vitrail faces train --people`. All other people
are verified. DATA has a folder for each person. Images are converted to grey levels of 92 x 112 pixels, and faces are
compared by the distance or the cosine of their first components.
"""

import argparse
import sys

import numpy as np

from vitrail.data.preprocess import Preprocess
from vitrail.evaluation.verification_metrics import PairBlock, score_all_pairs, verify_pairs
from vitrail.faces.people import name_splits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("people")
    parser.add_argument("--components", type=int, default=60)
    options = parser.parse_args()
    preprocess = Preprocess(resolution=(112, 92), resize="squash", crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    splits = name_splits(options.data, options.people).splits
    train, test = (
        preprocess.crop_all(splits[name].images).reshape(len(splits[name]), -1) / 255.0 for name in ("train", "test")
    )
    mean = train.mean(axis=0)
    _, _, components = np.linalg.svd(train - mean, full_matrices=False)
    faces = (test - mean) @ components[: options.components].T
    people = np.unique(splits["test"].labels, return_inverse=True)[1]
    for name, blocks in (("distance", lambda: score_by_distance(faces)), ("cosine", lambda: score_by_cosine(faces))):
        report = verify_pairs(blocks, people).report()
        rows = [("EER", report["eer"], report["eer_interval"])]
        rows += [(f"TAR at FAR {row['far']:g}", row["tar"], row["interval"]) for row in report["tar"] if row["tar"]]
        for metric, value, (low, high) in rows:
            sys.stdout.write(f"{name}  {metric}  {value:.1%} ({low:.1%} to {high:.1%})\n")


def score_by_cosine(faces):
    """Return blocks of the cosine similarities of all pairs of faces."""
    return score_all_pairs((faces / np.linalg.norm(faces, axis=1, keepdims=True)).astype(np.float32))


def score_by_distance(faces):
    """Yield a block of scores of all pairs of faces, from 1 for equal faces to -1 for the largest distance."""
    first, second = np.triu_indices(len(faces), 1)
    distances = np.concatenate([np.linalg.norm(faces[a] - faces[b], axis=1) for a, b in split_pairs(first, second)])
    yield PairBlock(first, second, (1 - 2 * distances / distances.max()).astype(np.float32))


def split_pairs(first, second, size=50_000):
    """Yield the indices of at most `size` pairs at a time, to limit memory."""
    return ((first[start : start + size], second[start : start + size]) for start in range(0, len(first), size))


if __name__ == "__main__":
    main()
