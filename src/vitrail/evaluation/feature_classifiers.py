"""Classifiers on frozen features: nearest neighbours, logistic regression, and the paper's least squares.

All functions take arrays of n training images with d features each and K classes, numbered from 0. They compute in
double precision.
"""

import numpy as np
import torch

from vitrail.core.errors import UsageError
from vitrail.core.least_squares import Linear, Ridge, as_float64, check_penalty
from vitrail.core.settings import Bounds, check_integer
from vitrail.data.dataset import sample_held_out, sample_per_class

NEIGHBOURS, TEMPERATURE = 20, 0.07  # as in DINO (arXiv 2104.14294)
SHOTS = (1, 5, 10, 25)
LOGISTIC_PENALTIES = 10.0 ** np.arange(5, -3, -1)

_LOGIT_SCALES = 10.0 ** np.linspace(-1, 2, 61)  # candidate factors from least-squares scores to logits
_HOLDOUT = 0.2  # share of the training images by which the penalty of the logistic regression is chosen
_BLOCK_ROWS = 256  # queries per matrix of similarities
_MAX_ITERATIONS = 1000  # of L-BFGS
_ROUGH_SLOPE = 1e-5  # gradient at which L-BFGS stops while penalties are compared


def neighbour_votes(
    features: np.ndarray,
    labels: np.ndarray,
    queries: np.ndarray,
    *,
    classes: int,
    neighbours: int = NEIGHBOURS,
    temperature: float = TEMPERATURE,
) -> np.ndarray:
    """Return the share of votes for each class (m, K) among the nearest training features of each query.

    `queries` (m, d) are features. Neighbours are nearest by cosine similarity. The weight of a vote is
    exp(similarity / temperature), as in DINO. At temperature 0, all votes have the same weight.
    """
    check_integer("neighbours", neighbours, low=1, high=len(features))
    Bounds(0, below=1e9).check("temperature", temperature)
    features, queries = _normalise_rows(features), _normalise_rows(queries)
    shares = np.zeros((len(queries), classes))
    for start in range(0, len(queries), _BLOCK_ROWS):
        similarities = queries[start : start + _BLOCK_ROWS] @ features.T
        nearest = np.argpartition(-similarities, neighbours - 1, axis=1)[:, :neighbours]
        near = np.take_along_axis(similarities, nearest, axis=1)
        # Relative to the nearest neighbour: the shares are the same, and low temperatures do not overflow.
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
    """Fit a multinomial logistic regression by L-BFGS.

    Minimises the sum of the cross-entropies + penalty / 2 * |weight|^2. The bias is not penalised. The search starts at
    `start`, by default at zero, and stops when no component of the gradient of the mean loss exceeds `slope`.

    scikit-learn's LogisticRegression has C = 1 / penalty. For two classes it has one weight vector instead of two
    vectors of opposite sign, and C = 2 / penalty.
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
        max_iter=_MAX_ITERATIONS,
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
    """Fit a linear probe, and return it with its penalty.

    The probe is a logistic regression on standardised features (mean 0, deviation 1). The returned classifier takes
    features without standardisation. The default penalty is the strongest whose cross-entropy on a held-out fifth of
    each class is within one standard error of the smallest, because with few images several penalties are about equally
    good. The final fit uses all images. Raises UsageError without a penalty if every class has only one image.
    """
    features = as_float64(features)
    mean, deviation = features.mean(axis=0), features.std(axis=0)
    deviation[deviation <= 1e-6 * np.abs(mean)] = 1  # a feature that is constant in single precision
    standardised = (features - mean) / deviation
    if penalty is None:
        held_out = sample_held_out(labels, _HOLDOUT, seed)
        if not held_out.any():
            raise UsageError(
                "Penalty must be given if every class has only one image: none can be held out to choose it."
            )
        penalty = _choose_logistic_penalty(standardised, labels, held_out, classes)
    classifier = fit_logistic_regression(standardised, labels, classes=classes, penalty=penalty)
    weight = classifier.weight / deviation[:, None]
    return Linear(weight, classifier.bias - mean @ weight), penalty


def fit_ridge(
    features: np.ndarray, labels: np.ndarray, *, classes: int, penalty: float | None = None
) -> tuple[Linear, float]:
    """Fit the paper's few-shot classifier, least squares to targets in {-1, 1}^K, and return it with its penalty.

    The default penalty is chosen by leave-one-out.
    """
    system = Ridge(features, np.where(np.asarray(labels)[:, None] == np.arange(classes), 1.0, -1.0))
    penalty = system.choose_penalty() if penalty is None else penalty
    return system.solve(penalty), penalty


def fit_ridge_head(features: np.ndarray, labels: np.ndarray, *, classes: int) -> tuple[Linear, np.ndarray]:
    """Fit the few-shot classifier as a head that gives logits, and return it with its leave-one-out logits (n, K).

    The labels are classes (n), for a softmax, or several labels for each image (n, K), for a sigmoid. Least squares
    gives scores around 1 and -1. They are multiplied by the factor that minimises the cross-entropy of the
    leave-one-out scores, which does not change predictions.
    """
    labels = np.asarray(labels)
    is_multi_label = labels.ndim == 2
    targets = np.where(labels > 0 if is_multi_label else labels[:, None] == np.arange(classes), 1.0, -1.0)
    system = Ridge(features, targets)
    penalty = system.choose_penalty()
    scores = torch.from_numpy(targets - system.leave_one_out_errors(penalty))
    truth = torch.from_numpy(labels.astype(np.float64 if is_multi_label else np.int64))
    functional = torch.nn.functional
    loss = functional.binary_cross_entropy_with_logits if is_multi_label else functional.cross_entropy
    scale = min(_LOGIT_SCALES, key=lambda scale: float(loss(scores * scale, truth)))
    classifier = system.solve(penalty)
    return Linear(classifier.weight * scale, classifier.bias * scale), scores.numpy() * scale


def sample_shots(labels: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Return sorted indices of `shots` random samples of each class. More shots include the samples of fewer shots."""
    return sample_per_class(labels, shots, seed, stream="shots")


def _choose_logistic_penalty(features: np.ndarray, labels: np.ndarray, held_out: np.ndarray, classes: int) -> float:
    """Return the strongest penalty whose held-out loss is within one standard error of the smallest."""
    means, errors = [], []
    classifier = None
    for penalty in LOGISTIC_PENALTIES:  # from strong to weak: each solution is a good start for the next
        classifier = fit_logistic_regression(
            features[~held_out],
            labels[~held_out],
            classes=classes,
            penalty=penalty,
            slope=_ROUGH_SLOPE,
            start=classifier,
        )
        scores, truth = torch.from_numpy(classifier(features[held_out])), torch.from_numpy(labels[held_out])
        losses = torch.nn.functional.cross_entropy(scores, truth, reduction="none").numpy()
        means.append(losses.mean())
        errors.append(losses.std() / np.sqrt(len(losses)))
    smallest = int(np.argmin(means))
    return float(LOGISTIC_PENALTIES[np.argmax(np.array(means) <= means[smallest] + errors[smallest])])


def _normalise_rows(features: np.ndarray) -> np.ndarray:
    """Scale the features of each image to length 1."""
    features = as_float64(features)
    length = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(length > 0, length, 1)
