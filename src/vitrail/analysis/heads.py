"""Statistics of attention heads: attention distance and entropy.

Shapes: B images, H heads, T tokens of which the first are [CLS] and registers, N = h*w patches.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from vitrail.core.settings import Pair
from vitrail.models.activations import Activations
from vitrail.models.base import Layout


class HeadStatistics(NamedTuple):
    """Statistics of the attention heads of one layer: means over the patches of each image, (B, H)."""

    distance: np.ndarray
    """Mean attention distance: distance in pixels between the centres of patches, weighted by attention."""
    of_uniform: np.ndarray
    """Mean attention distance relative to uniform attention; 1 means no preference for near or far patches."""
    entropy: np.ndarray
    """Normalised entropy of the attention of a patch: 1 if it is uniform, 0 if it is on a single patch."""
    prefix_mass: np.ndarray
    """Share of the attention of a patch to [CLS] and registers. The other statistics exclude this share."""


def head_input_weights(activations: Activations, layout: Layout) -> np.ndarray:
    """Return the weight of each token of the last layer in the input of the classification head, (B, T).

    It is 1 for [CLS]; or equal for all patches; or, for attention pooling, its attention weights averaged over heads.
    """
    if activations.pooling is not None:
        return activations.pooling.float().mean(dim=1)[:, 0].cpu().numpy()
    weights = np.zeros((len(activations.logits), layout.prefix + layout.grid[0] * layout.grid[1]), np.float32)
    if layout.reads == "[CLS]":
        weights[:, 0] = 1
    else:
        weights[:, layout.prefix :] = 1 / (weights.shape[1] - layout.prefix)
    return weights


def grid_distances(grid: Pair, step: Pair) -> np.ndarray:
    """Return the distances (N, N) in pixels between the patches of a grid, in raster order."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    down = (rows[:, None] - rows) * step[0]
    across = (columns[:, None] - columns) * step[1]
    return np.hypot(down, across)


def measure_heads(attention_BHTT: Tensor | np.ndarray, layout: Layout) -> HeadStatistics:
    """Return the attention distance and entropy of each head of a layer.

    Attention to [CLS] and registers has no distance. Its share is reported separately, and attention to patches is
    normalised to sum 1. With masked attention, uniform means uniform over the allowed patches.
    """
    patch_attention = np.asarray(attention_BHTT, np.float64)[:, :, layout.prefix :, layout.prefix :]
    mass = patch_attention.sum(-1, keepdims=True)
    patch_attention = patch_attention / np.maximum(mass, 1e-300)
    distances = grid_distances(layout.grid, layout.step)
    allowed = np.ones_like(distances) if layout.allowed is None else layout.allowed.astype(np.float64)
    counts = allowed.sum(axis=1)
    distance = np.einsum("bhqk,qk->bh", patch_attention, distances) / len(distances)
    uniform = ((allowed * distances).sum(axis=1) / counts).mean()
    entropies = -(patch_attention * np.log(np.maximum(patch_attention, 1e-300))).sum(-1)
    entropies /= np.log(np.maximum(counts, 2))
    return HeadStatistics(
        distance=distance,
        of_uniform=distance / max(uniform, 1e-300),
        entropy=entropies.mean(axis=2),
        prefix_mass=1 - mass[..., 0].mean(axis=2),
    )


def entropy(shares: np.ndarray) -> float | None:
    """Return the normalised entropy of a map: 1 if uniform, 0 if it has a single position, None if it is all zero."""
    values = np.asarray(shares, np.float64).ravel()
    if not values.sum():
        return None
    values = values / values.sum()
    return abs(float((values * np.log(np.maximum(values, 1e-300))).sum() / np.log(max(len(values), 2))))
