"""Faces without a network: principal components of pixels, the bar that any model must pass.

    .venv/bin/python benchmarks/eigenfaces.py DATA PEOPLE.txt

PEOPLE.txt names who is trained on, a name a line, as for `vitrail faces train --people`; all others are verified.
Images of DATA (one folder a person) are grey, 92 x 112 pixels, and faces are compared by the distance or by the cosine
of their first components.
"""

import argparse
import sys

import numpy as np

from vitrail.data.preprocess import Preprocess
from vitrail.evaluation.verification_metrics import PairBlock, score_all_pairs, verify_pairs
from vitrail.faces.people import name_splits


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("data")
    words.add_argument("people")
    words.add_argument("--components", type=int, default=60)
    given = words.parse_args()
    read = Preprocess(resolution=(112, 92), resize="squash", crop_fraction=1.0, mean=(0.5,), std=(0.5,))
    splits = name_splits(given.data, given.people).splits
    train, test = (
        read.crop_all(splits[name].images).reshape(len(splits[name]), -1) / 255.0 for name in ("train", "test")
    )
    mean = train.mean(axis=0)
    _, _, components = np.linalg.svd(train - mean, full_matrices=False)
    faces = (test - mean) @ components[: given.components].T
    people = np.unique(splits["test"].labels, return_inverse=True)[1]
    for name, blocks in (("distance", lambda: by_distance(faces)), ("cosine", lambda: by_cosine(faces))):
        found = verify_pairs(blocks, people).report()
        rows = [("EER", found["eer"], found["eer_interval"])]
        rows += [(f"TAR at FAR {row['far']:g}", row["tar"], row["interval"]) for row in found["tar"] if row["tar"]]
        for what, value, (low, high) in rows:
            sys.stdout.write(f"{name}  {what}  {value:.1%} ({low:.1%} to {high:.1%})\n")


def by_cosine(faces):
    return score_all_pairs((faces / np.linalg.norm(faces, axis=1, keepdims=True)).astype(np.float32))


def by_distance(faces):
    """Scores from 1 for equal faces down to -1 for the two that differ most."""
    one, other = np.triu_indices(len(faces), 1)
    distances = np.concatenate([np.linalg.norm(faces[a] - faces[b], axis=1) for a, b in chunks(one, other)])
    yield PairBlock(one, other, (1 - 2 * distances / distances.max()).astype(np.float32))


def chunks(one, other, size=50_000):
    return ((one[at : at + size], other[at : at + size]) for at in range(0, len(one), size))


if __name__ == "__main__":
    main()
