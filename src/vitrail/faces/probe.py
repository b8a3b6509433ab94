"""An embedding from the features of a frozen model, before training: whitening within people.

What differs between images of one person (pose, light, expression) must not count, and what differs between people
must. So features are turned and scaled until the differences within people are the same in every direction, as linear
discriminant analysis does; cosines are then those of a Gaussian model of faces.

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
"""Share of the covariance within people that is replaced by a sphere of the same size: few images cannot tell more."""


class Whitening(NamedTuple):
    """`(features - mean) @ matrix` has the same covariance within people in every direction."""

    mean: np.ndarray
    """(D)"""
    matrix: np.ndarray
    """(D, E)"""


def whiten_within(features_nD: np.ndarray, people_n: np.ndarray, width: int, seed: int) -> Whitening:
    """The whitening of the differences between images of one person, to `width` numbers: where these are fewer than the
    features, the directions in which people differ most; where they are more, in a random rotation, which keeps every
    cosine."""
    features_nD = np.asarray(features_nD, np.float64)
    mean = features_nD.mean(axis=0)
    centred_nD = features_nD - mean
    _, number_n, count_K = np.unique(people_n, return_inverse=True, return_counts=True)
    sums_KD = np.zeros((len(count_K), centred_nD.shape[1]))
    np.add.at(sums_KD, number_n, centred_nD)
    means_KD = sums_KD / count_K[:, None]
    within_nD = centred_nD - means_KD[number_n]
    covariance = within_nD.T @ within_nD / len(within_nD)
    least = max(1e-6 * float(np.square(features_nD).mean()), 1e-12)  # what does not vary within people is not noise
    sphere = max(np.trace(covariance) / len(covariance), least) * np.eye(len(covariance))
    variances, axes = np.linalg.eigh((1 - SHRINKAGE) * covariance + SHRINKAGE * sphere)
    matrix = axes / np.sqrt(variances)
    # The whole basis: where there are fewer people than features, the others complete it.
    white_KD = means_KD @ matrix
    _, people_DD = np.linalg.eigh(white_KD.T @ white_KD)
    matrix = matrix @ people_DD[:, ::-1][:, :width]
    if width > matrix.shape[1]:
        drawn = np.random.default_rng(seed).normal(size=(width, matrix.shape[1]))
        matrix = matrix @ np.linalg.qr(drawn)[0].T
    return Whitening(mean, matrix)


@torch.no_grad()
def set_embedding(model: AnyModel, features_nD: np.ndarray, people_n: np.ndarray, seed: int) -> None:
    """Set the embedding of a model to the whitening within people of these features."""
    linear, norm = cast(EmbeddingHead, model.head).parts
    white = whiten_within(features_nD, people_n, linear.out_features, seed)
    variance_E = ((features_nD - white.mean) @ white.matrix).var(axis=0)
    # The norm divides by the deviation and multiplies it back: what is whitened stays so.
    values = {
        "0.weight": white.matrix.T,
        "1.running_mean": white.mean @ white.matrix,
        "1.running_var": variance_E,
        "1.weight": np.sqrt(variance_E + norm.eps),
    }
    model.head.load_state_dict(model.head.state_dict() | {name: torch.tensor(one) for name, one in values.items()})


@torch.no_grad()
def mean_embeddings(model: AnyModel, features_nD: np.ndarray, people_n: np.ndarray, people: int) -> Tensor:
    """The mean of each person's unit embeddings (K, E), as a unit vector; a random one for people without an image."""
    weight = next(model.parameters())
    embeddings_nE = F.normalize(model.head(torch.from_numpy(features_nD).to(weight)).float(), dim=1).cpu()
    sums_KE = torch.zeros(people, embeddings_nE.shape[1]).index_add_(0, torch.from_numpy(people_n), embeddings_nE)
    is_known_K = torch.from_numpy(np.bincount(people_n, minlength=people) > 0)
    return F.normalize(torch.where(is_known_K[:, None], sums_KE, torch.randn_like(sums_KE)), dim=1)
