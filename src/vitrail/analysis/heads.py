"""Statistics of attention heads: attention distance and entropy.

Shapes: B images, H heads, T tokens of which the first are [CLS] and registers, N = h*w patches.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from vitrail.core.settings import Pair
from vitrail.models.activations import Activations
from vitrail.models.base import Layout


class Heads(NamedTuple):
    """Statistics of the heads of one layer, (B, H) each, means over the patches of an image."""

    distance: np.ndarray
    """Mean attention distance in pixels, between centres of patches, weighted by attention."""
    of_uniform: np.ndarray
    """Distance relative to uniform attention; 1 means no preference for near or far."""
    entropy: np.ndarray
    """Normalised entropy of a patch's attention over patches: 1 is uniform, 0 a single patch."""
    prefix_mass: np.ndarray
    """Share of a patch's attention to [CLS] and registers; distances are of the rest."""


def reading(activations: Activations, layout: Layout) -> np.ndarray:
    """Weights of the last layer's tokens in the input of the head (B, T): 1 for [CLS], equal weights of the patches, or
    the attention of attention pooling, mean over heads."""
    if activations.pooling is not None:
        return activations.pooling.float().mean(dim=1)[:, 0].cpu().numpy()
    shares = np.zeros((len(activations.logits), layout.prefix + layout.grid[0] * layout.grid[1]), np.float32)
    if layout.reads == "[CLS]":
        shares[:, 0] = 1
    else:
        shares[:, layout.prefix :] = 1 / (shares.shape[1] - layout.prefix)
    return shares


def grid_distances(grid: Pair, step: Pair) -> np.ndarray:
    """Distances (N, N) in pixels between the patches of a grid, in raster order."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    down = (rows[:, None] - rows) * step[0]
    across = (columns[:, None] - columns) * step[1]
    return np.hypot(down, across)


def measure_heads(attention_BHTT: Tensor | np.ndarray, layout: Layout) -> Heads:
    """Attention distance and entropy of each head of a layer.

    Attention to [CLS] and registers has no distance: it is reported separately, and the rest is normalised. With masked
    attention, uniform means uniform over the allowed patches.
    """
    among = np.asarray(attention_BHTT, np.float64)[:, :, layout.prefix :, layout.prefix :]
    mass = among.sum(-1, keepdims=True)
    among = among / np.maximum(mass, 1e-300)
    distances = grid_distances(layout.grid, layout.step)
    allowed = np.ones_like(distances) if layout.allowed is None else layout.allowed.astype(np.float64)
    counts = allowed.sum(axis=1)
    distance = np.einsum("bhqk,qk->bh", among, distances) / len(distances)
    uniform = ((allowed * distances).sum(axis=1) / counts).mean()
    spread = -(among * np.log(np.maximum(among, 1e-300))).sum(-1) / np.log(np.maximum(counts, 2))
    return Heads(distance, distance / max(uniform, 1e-300), spread.mean(axis=2), 1 - mass[..., 0].mean(axis=2))


def entropy(shares: np.ndarray) -> float | None:
    """Normalised entropy of a map: 1 is uniform, 0 a single position. None for an empty map."""
    values = np.asarray(shares, np.float64).ravel()
    if not values.sum():
        return None
    values = values / values.sum()
    return abs(float((values * np.log(np.maximum(values, 1e-300))).sum() / np.log(max(len(values), 2))))
