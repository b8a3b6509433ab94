"""The embedded data set: 1,797 handwritten digits of 8 x 8 pixels (see NOTICE for its origin and licence)."""

from importlib import resources
from typing import NamedTuple

import numpy as np


class Pictures(NamedTuple):
    """Pictures in memory: uint8 (n, height, width, channels), and the class index of each."""

    images: np.ndarray
    labels: np.ndarray


LABELS = tuple("0123456789")

_HELD_OUT = 36  # of each class: 360 in all, a fifth


def load_digits(seed: int = 0) -> tuple[Pictures, Pictures]:
    """Training and held-out digits, split by a seeded draw with equally many of each class held out."""
    with resources.files("vitrail.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        everything = Pictures(arrays["images"], arrays["labels"].astype(np.int64))
    order = np.random.default_rng(seed).permutation(len(everything.labels))
    held_out = np.concatenate([order[everything.labels[order] == digit][:_HELD_OUT] for digit in range(10)])
    training = np.setdiff1d(order, held_out)
    return _choose(everything, training), _choose(everything, np.sort(held_out))


def _choose(pictures: Pictures, index: np.ndarray) -> Pictures:
    return Pictures(pictures.images[index], pictures.labels[index])
