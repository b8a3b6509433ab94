"""The embedded data set."""

import numpy as np

from vitrail.data.digits import load_digits


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits as reference

    training, held_out = load_digits()
    assert training.images.shape == (1437, 8, 8, 1)
    assert held_out.images.shape == (360, 8, 8, 1)
    assert np.bincount(held_out.labels).tolist() == [36] * 10

    def rows(images, labels):
        return sorted(map(tuple, np.column_stack([images.reshape(len(labels), -1), labels]).tolist()))

    theirs = reference()
    both = rows(np.concatenate([training.images, held_out.images]), np.concatenate([training.labels, held_out.labels]))
    assert both == rows(np.round(theirs.images * 255 / 16).astype(np.uint8), theirs.target)


def test_the_split_is_seeded():
    one, other, third = load_digits(), load_digits(), load_digits(seed=1)
    assert np.array_equal(one[1].images, other[1].images)
    assert not np.array_equal(one[1].images, third[1].images)
