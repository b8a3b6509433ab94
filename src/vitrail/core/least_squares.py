"""Ridge regression in double precision, with one decomposition for all penalties.

Shapes: n training images, m images to predict, d features, K targets (one for each class).
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vitrail.core.errors import UsageError

RIDGE_PENALTIES = 10.0 ** np.linspace(-6, 4, 31)  # times the mean eigenvalue of the Gram matrix


class Linear(NamedTuple):
    """A linear classifier, `features @ weight + bias`, such as a model's head."""

    weight: np.ndarray
    """(d, K)"""
    bias: np.ndarray
    """(K)"""

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return scores (m, K) of features (m, d)."""
        return np.asarray(features, np.float64) @ self.weight + self.bias

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Return the softmax of the scores (m, K), for a classifier that was fitted with cross-entropy."""
        scores = self(features)
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)


class Ridge:
    """Ridge regression of targets (n, K) on features (n, d), with one decomposition for all penalties.

    Minimises |targets - features @ weight - bias|^2 + penalty * |weight|^2. The bias is not penalised: features and
    targets are centred. The smaller of the Gram matrices (n, n) and (d, d) is decomposed.
    """

    def __init__(self, features: np.ndarray, targets: np.ndarray) -> None:
        features, targets = as_float64(features), as_float64(targets)
        self._centre, self._mean = features.mean(axis=0), targets.mean(axis=0)
        x, self._targets = features - self._centre, targets - self._mean
        count, width = x.shape
        if count < 2:
            raise UsageError(f"Training images must be 2 or more, got {count}.")
        # With X = U S V': few images give U, many give X V. Nothing is divided by S, which may be 0.
        self._is_wide = count <= width + 1
        if self._is_wide:
            gram = x @ x.T
            # Centring leaves no variance in the direction of all ones. The added constant makes its eigenvalue the
            # largest, so that it is the last one, which is dropped.
            squares, vectors = np.linalg.eigh(gram + (2 * np.trace(gram) + 1) / count)
            squares, self._left = squares[:-1], vectors[:, :-1]
            self._basis = x.T @ self._left
        else:
            squares, self._basis = np.linalg.eigh(x.T @ x)
            self._left = x @ self._basis
        self._squares = np.maximum(squares, 0)
        self._coordinates = self._left.T @ self._targets

    def solve(self, penalty: float) -> Linear:
        """Return the weights and bias for a penalty."""
        check_penalty(penalty)
        weight = self._basis @ (self._coordinates / (self._squares + penalty)[:, None])
        return Linear(weight, self._mean - self._centre @ weight)

    def leave_one_out_errors(self, penalty: float) -> np.ndarray:
        """Return leave-one-out errors (n, K): the residual of each image divided by 1 - h, where h is its diagonal
        entry of the hat matrix."""
        check_penalty(penalty)
        if self._is_wide:  # both are tiny for a small penalty: computing them as 1 - ... would lose all digits
            factors = penalty / (self._squares + penalty)
            residuals, one_minus_h = self._left @ (factors[:, None] * self._coordinates), self._left**2 @ factors
        else:
            factors = 1 / (self._squares + penalty)
            residuals = self._targets - self._left @ (factors[:, None] * self._coordinates)
            one_minus_h = 1 - 1 / len(residuals) - self._left**2 @ factors
        return residuals / one_minus_h[:, None]

    def choose_penalty(self, penalties: Iterable[float] | None = None) -> float:
        """Return the penalty with the smallest leave-one-out squared error.

        By default the penalties are `RIDGE_PENALTIES` times the mean eigenvalue of the Gram matrix.
        """
        if penalties is None:
            penalties = RIDGE_PENALTIES * (self._squares.mean() or 1.0)
        return float(min(penalties, key=lambda penalty: np.square(self.leave_one_out_errors(penalty)).mean()))


def as_float64(array: np.ndarray) -> np.ndarray:
    """Return an array as contiguous float64, without a copy if it is."""
    return np.ascontiguousarray(array, np.float64)


def check_penalty(penalty: float) -> None:
    """Raise UsageError unless the penalty of a ridge regression is positive and finite."""
    if not 0 < penalty < np.inf:
        raise UsageError(f"Penalty must be a number above 0, got {penalty!r}.")
