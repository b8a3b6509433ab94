"""Classifiers on frozen features: nearest neighbours, logistic regression, the paper's least squares.

Plain functions on arrays: n training images with d features each, K classes numbered from 0. Everything is computed in
double precision.
"""

import numpy as np
import torch

from vitrail.core.errors import UsageError
from vitrail.core.least_squares import Linear, Ridge, as_float64, check_penalty
from vitrail.core.settings import Bounds, check_integer
from vitrail.data.dataset import sample_held_out, sample_per_class

NEIGHBOURS, TEMPERATURE = 20, 0.07  # DINO's (arXiv 2104.14294)
SHOTS = (1, 5, 10, 25)
LOGISTIC_PENALTIES = 10.0 ** np.arange(5, -3, -1)

_SCALES = 10.0 ** np.linspace(-1, 2, 61)  # of least-squares scores that become logits
_HELD_OUT = 0.2  # of the training images, to choose the logistic regression's penalty by
_ROWS = 256  # images whose neighbours are looked for at a time
_TURNS = 1000  # L-BFGS ends after so many iterations at the latest
_ROUGH = 1e-5  # slope at which it ends while penalties are compared


def neighbour_votes(
    features: np.ndarray,
    labels: np.ndarray,
    asked: np.ndarray,
    *,
    classes: int,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Shares (m, K) of the votes of the nearest training `features` for each query in `asked` (m, d), by cosine
    similarity.

    The weight of a vote is exp(similarity / temperature), as in DINO; at temperature 0 all have the same weight.
    """
    check_integer("neighbours", neighbours, low=1, high=len(features))
    Bounds(0, below=1e9).check("temperature", temperature)
    known, asked = _unit(features), _unit(asked)
    shares = np.zeros((len(asked), classes))
    for start in range(0, len(asked), _ROWS):
        similarity = asked[start : start + _ROWS] @ known.T
        nearest = np.argpartition(-similarity, neighbours - 1, axis=1)[:, :neighbours]
        near = np.take_along_axis(similarity, nearest, axis=1)
        # Relative to the nearest: the shares are the same, and no temperature is too low.
        votes = np.exp((near - near.max(axis=1, keepdims=True)) / temperature) if temperature else np.ones_like(near)
        rows = np.arange(start, start + len(near))[:, None]
        np.add.at(shares, (rows, labels[nearest]), votes)
    return shares / shares.sum(axis=1, keepdims=True)


def fit_logistic_regression(
    features: np.ndarray,
    labels: np.ndarray,
    *,
    classes: int,
    penalty: float,
    slope: float = 1e-7,
    start: Linear | None = None,
) -> Linear:
    """Multinomial logistic regression by L-BFGS: minimises the sum of cross-entropies + penalty / 2 * |weight|^2.

    The bias is not penalised. scikit-learn's LogisticRegression has C = 1 / penalty; for two classes, where it has one
    vector instead of two that differ by their sign, C = 2 / penalty. The search starts at `start` and ends when no
    component of the mean loss's gradient exceeds `slope`.
    """
    check_penalty(penalty)
    x, y = torch.from_numpy(as_float64(features)), torch.from_numpy(np.asarray(labels, np.int64))
    weight = torch.zeros(x.shape[1], classes, dtype=torch.float64)
    bias = torch.zeros(classes, dtype=torch.float64)
    if start is not None:
        weight.copy_(torch.from_numpy(start.weight))
        bias.copy_(torch.from_numpy(start.bias))
    optimiser = torch.optim.LBFGS(
        [weight.requires_grad_(), bias.requires_grad_()],
        max_iter=_TURNS,
        tolerance_grad=slope,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.cross_entropy(x @ weight + bias, y) + penalty / (2 * len(x)) * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    return Linear(weight.detach().numpy(), bias.detach().numpy())


def fit_probe(
    features: np.ndarray, labels: np.ndarray, *, classes: int, penalty: float | None = None, seed: int = 0
) -> tuple[Linear, float]:
    """The linear probe, and its penalty.

    Logistic regression on standardised features (mean 0, deviation 1); the returned classifier takes features without
    standardisation. The penalty, if not given, is the strongest whose cross-entropy on a held-out fifth of each class
    is within one standard error of the smallest (with few images, several are about equally good); then all images are
    used.
    """
    features = as_float64(features)
    mean, deviation = features.mean(axis=0), features.std(axis=0)
    deviation[deviation <= 1e-6 * np.abs(mean)] = 1  # a constant, in single precision, says nothing
    standard = (features - mean) / deviation
    if penalty is None:
        held_out = sample_held_out(labels, _HELD_OUT, seed)
        if not held_out.any():
            raise UsageError(
                "Penalty must be given if every class has only one image: none can be held out to choose it."
            )
        penalty = _choose_logistic(standard, labels, held_out, classes)
    found = fit_logistic_regression(standard, labels, classes=classes, penalty=penalty)
    weight = found.weight / deviation[:, None]
    return Linear(weight, found.bias - mean @ weight), penalty


def fit_ridge(
    features: np.ndarray, labels: np.ndarray, *, classes: int, penalty: float | None = None
) -> tuple[Linear, float]:
    """The paper's few-shot classifier and its penalty: least squares to {-1, 1}^K, the penalty by leave-one-out."""
    system = Ridge(features, np.where(np.asarray(labels)[:, None] == np.arange(classes), 1.0, -1.0))
    penalty = system.choose_penalty() if penalty is None else penalty
    return system.solve(penalty), penalty


def fit_ridge_head(features: np.ndarray, labels: np.ndarray, *, classes: int) -> tuple[Linear, np.ndarray]:
    """The few-shot classifier as a head for cross-entropy (sigmoid, if labels are several for each image: (n, K)), and
    its leave-one-out scores (n, K).

    Least squares gives scores around 1 and -1, not logits. All scores are multiplied by the factor that minimises the
    cross-entropy of the leave-one-out scores, which does not change predictions.
    """
    known = np.asarray(labels)
    several = known.ndim == 2
    targets = np.where(known > 0 if several else known[:, None] == np.arange(classes), 1.0, -1.0)
    system = Ridge(features, targets)
    penalty = system.choose_penalty()
    scores = torch.from_numpy(targets - system.leave_one_out_errors(penalty))
    truth = torch.from_numpy(known.astype(np.float64 if several else np.int64))
    losses = torch.nn.functional
    loss = losses.binary_cross_entropy_with_logits if several else losses.cross_entropy
    scale = min(_SCALES, key=lambda scale: float(loss(scores * scale, truth)))
    found = system.solve(penalty)
    return Linear(found.weight * scale, found.bias * scale), scores.numpy() * scale


def sample_shots(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Sorted indices of `shots` random samples of each class; more shots contain those of fewer."""
    return sample_per_class(labels, shots, seed, stream="shots")


def _choose_logistic(features: np.ndarray, labels: np.ndarray, held_out: np.ndarray, classes: int) -> float:
    means, spreads = [], []
    found = None
    for penalty in LOGISTIC_PENALTIES:  # from strong to weak: each solution is a good start for the next
        found = fit_logistic_regression(
            features[~held_out], labels[~held_out], classes=classes, penalty=penalty, slope=_ROUGH, start=found
        )
        scores, truth = torch.from_numpy(found(features[held_out])), torch.from_numpy(labels[held_out])
        losses = torch.nn.functional.cross_entropy(scores, truth, reduction="none").numpy()
        means.append(losses.mean())
        spreads.append(losses.std() / np.sqrt(len(losses)))
    best = int(np.argmin(means))
    return float(LOGISTIC_PENALTIES[np.argmax(np.array(means) <= means[best] + spreads[best])])


def _unit(features: np.ndarray) -> np.ndarray:
    features = as_float64(features)
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(length > 0, length, 1)
