"""Initial weights of a face embedding: whitening of a frozen model's features within people.

Differences between images of one person (pose, light, expression) should not change the score; differences between
people should. As in linear discriminant analysis, features are rotated and scaled until the covariance within people is
the same in every direction.

Shapes: n images, D width of the features, E width of the embedding, K people.
"""

from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.base import AnyModel
from vitrail.models.layers import EmbeddingHead

SHRINKAGE = 0.3
"""Weight of the isotropic covariance that the covariance within people is shrunk towards, because images are few."""


class Whitening(NamedTuple):
    """An affine map of features: `(features - mean) @ matrix` has an isotropic covariance within people."""

    mean: np.ndarray
    """(D)"""
    matrix: np.ndarray
    """(D, E)"""


def whiten_within(features_nD: np.ndarray, people_n: np.ndarray, width: int, seed: int) -> Whitening:
    """Compute the whitening of features within people, to `width` dimensions.

    With fewer dimensions than features, the directions in which people differ most are kept. With more, the whitened
    features are rotated at random into the larger space, which keeps every cosine.
    """
    features_nD = np.asarray(features_nD, np.float64)
    mean = features_nD.mean(axis=0)
    centred_nD = features_nD - mean
    _, person_n, count_K = np.unique(people_n, return_inverse=True, return_counts=True)
    sums_KD = np.zeros((len(count_K), centred_nD.shape[1]))
    np.add.at(sums_KD, person_n, centred_nD)
    means_KD = sums_KD / count_K[:, None]
    within_nD = centred_nD - means_KD[person_n]
    covariance = within_nD.T @ within_nD / len(within_nD)
    # The minimum keeps the scale finite for features that are constant within people.
    min_variance = max(1e-6 * float(np.square(features_nD).mean()), 1e-12)
    isotropic = max(np.trace(covariance) / len(covariance), min_variance) * np.eye(len(covariance))
    variances, axes = np.linalg.eigh((1 - SHRINKAGE) * covariance + SHRINKAGE * isotropic)
    matrix = axes / np.sqrt(variances)
    # `eigh` returns a complete basis also if there are fewer people than features.
    white_KD = means_KD @ matrix
    _, people_DD = np.linalg.eigh(white_KD.T @ white_KD)
    matrix = matrix @ people_DD[:, ::-1][:, :width]
    if width > matrix.shape[1]:
        drawn = np.random.default_rng(seed).normal(size=(width, matrix.shape[1]))
        matrix = matrix @ np.linalg.qr(drawn)[0].T
    return Whitening(mean, matrix)


@torch.no_grad()
def set_embedding(model: AnyModel, features_nD: np.ndarray, people_n: np.ndarray, seed: int) -> None:
    """Set the weights of a model's embedding head, in place, to the whitening of these features within people."""
    linear, norm = cast(EmbeddingHead, model.head).parts
    white = whiten_within(features_nD, people_n, linear.out_features, seed)
    variance_E = ((features_nD - white.mean) @ white.matrix).var(axis=0)
    # BatchNorm divides by the standard deviation; its weight multiplies it back, so that outputs stay whitened.
    values = {
        "0.weight": white.matrix.T,
        "1.running_mean": white.mean @ white.matrix,
        "1.running_var": variance_E,
        "1.weight": np.sqrt(variance_E + norm.eps),
    }
    model.head.load_state_dict(model.head.state_dict() | {name: torch.tensor(value) for name, value in values.items()})


@torch.no_grad()
def mean_embeddings(model: AnyModel, features_nD: np.ndarray, people_n: np.ndarray, people: int) -> Tensor:
    """Return the mean embedding of each person (K, E) as a unit vector; a random vector for people without images."""
    weight = next(model.parameters())
    embeddings_nE = F.normalize(model.head(torch.from_numpy(features_nD).to(weight)).float(), dim=1).cpu()
    sums_KE = torch.zeros(people, embeddings_nE.shape[1]).index_add_(0, torch.from_numpy(people_n), embeddings_nE)
    has_images_K = torch.from_numpy(np.bincount(people_n, minlength=people) > 0)
    return F.normalize(torch.where(has_images_K[:, None], sums_KE, torch.randn_like(sums_KE)), dim=1)
