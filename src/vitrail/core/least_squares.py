"""Ridge regression in double precision, decomposed once for all penalties."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vitrail.core.errors import UsageError

RIDGE_PENALTIES = 10.0 ** np.linspace(-6, 4, 31)  # times the mean eigenvalue of the Gram matrix


class Linear(NamedTuple):
    """A linear classifier, `features @ weight + bias`, as a model's head."""

    weight: np.ndarray
    """(d, K)"""
    bias: np.ndarray
    """(K)"""

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Scores (m, K) of features (m, d)."""
        return np.asarray(features, np.float64) @ self.weight + self.bias

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """Softmax of the scores (m, K), for a classifier that was fitted with cross-entropy."""
        scores = self(features)
        likely = np.exp(scores - scores.max(axis=1, keepdims=True))
        return likely / likely.sum(axis=1, keepdims=True)


class Ridge:
    """Ridge regression, decomposed once for all penalties.

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
        # Of X = U S V', few images give U and many give X V; neither is ever divided by S, which may be 0.
        self._few = count <= width + 1
        if self._few:
            gram = x @ x.T
            # The direction that centring has emptied, all ones, is made the last and left out.
            squares, left = np.linalg.eigh(gram + (2 * np.trace(gram) + 1) / count)
            squares, self._left = squares[:-1], left[:, :-1]
            self._basis = x.T @ self._left
        else:
            squares, self._basis = np.linalg.eigh(x.T @ x)
            self._left = x @ self._basis
        self._squares = np.maximum(squares, 0)
        self._coordinates = self._left.T @ self._targets

    def solve(self, penalty: float) -> Linear:
        """The weights and bias for a penalty."""
        check_penalty(penalty)
        weight = self._basis @ (self._coordinates / (self._squares + penalty)[:, None])
        return Linear(weight, self._mean - self._centre @ weight)

    def leave_one_out_errors(self, penalty: float) -> np.ndarray:
        """Leave-one-out errors (n, K): the residual of each image divided by 1 - h, where h is its diagonal entry of
        the hat matrix."""
        check_penalty(penalty)
        if self._few:  # both are small where the penalty is, and computed as such
            kept = penalty / (self._squares + penalty)
            error, others = self._left @ (kept[:, None] * self._coordinates), self._left**2 @ kept
        else:
            shrunk = 1 / (self._squares + penalty)
            error = self._targets - self._left @ (shrunk[:, None] * self._coordinates)
            others = 1 - 1 / len(error) - self._left**2 @ shrunk
        return error / others[:, None]

    def choose_penalty(self, penalties: Iterable[float] | None = None) -> float:
        """The penalty with the smallest leave-one-out squared error; by default from a grid on the scale of the
        features."""
        if penalties is None:
            penalties = RIDGE_PENALTIES * (self._squares.mean() or 1.0)
        return float(min(penalties, key=lambda penalty: np.square(self.leave_one_out_errors(penalty)).mean()))


def as_float64(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array, np.float64)


def check_penalty(penalty: float) -> None:
    if not 0 < penalty < np.inf:
        raise UsageError(f"Penalty must be a number above 0, got {penalty!r}.")
