"""Attention in numbers: where tokens stand, how far heads look, and how evenly.

Shapes: B images, H heads, T tokens of which the first are [CLS] and registers, N = h*w patches.
"""

from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from vitrail.models.base import AnyModel, Seen
from vitrail.models.igpt import IGPT
from vitrail.models.vit import ViT
from vitrail.settings import Pair

Reads = Literal["[CLS]", "mean", "pool"]


class Layout(NamedTuple):
    """Where the tokens of a model stand in the picture, and which of them its head reads."""

    grid: Pair
    """Rows and columns of patches (or pixels)."""
    step: Pair
    """Pixels from one to the next."""
    prefix: int
    """[CLS] and registers, which stand before them and nowhere in the picture."""
    reads: Reads
    """What the head reads: [CLS], the mean of the patches, or all tokens through a query of its own."""
    allowed: np.ndarray | None = None
    """(N, N): at which patches each patch may look, where it may not look at all."""


class Heads(NamedTuple):
    """Numbers of the heads of one layer, (B, H) each, means over the patches of a picture."""

    distance: np.ndarray
    """Mean attention distance in pixels, between centres of patches, weighted by attention."""
    of_uniform: np.ndarray
    """The same as a share of what uniform attention has: 1 is no preference for near or far."""
    entropy: np.ndarray
    """Entropy of a patch's attention over patches as a share of the largest: 1 is flat, 0 is one patch alone."""
    prefix_mass: np.ndarray
    """Share of a patch's attention that goes to [CLS] and registers; distances are of the rest."""


def layout(model: AnyModel) -> Layout | None:
    """The layout of a model whose places attend to each other; None for other families."""
    c = model.config
    if isinstance(model, ViT):
        step = (c.step[0] * c.canvas_scale, c.step[1] * c.canvas_scale)
        reads: dict[str, Reads] = {"cls": "[CLS]", "gap": "mean", "map": "pool"}
        allowed = None if model.mask is None else model.mask[c.prefix :, c.prefix :].cpu().numpy()
        return Layout(c.grid, step, c.prefix, reads[c.pool], allowed)
    if isinstance(model, IGPT):
        return Layout(c.grid, (1, 1), 0, "mean", None if model.mask is None else model.mask.cpu().numpy())
    return None


def reading(seen: Seen, where: Layout) -> np.ndarray:
    """The shares in which the head of a model reads its last tokens, (B, T). With attention pooling, those of its
    query, mean over heads."""
    if seen.pooling is not None:
        return seen.pooling.float().mean(dim=1)[:, 0].cpu().numpy()
    shares = np.zeros((len(seen.logits), where.prefix + where.grid[0] * where.grid[1]), np.float32)
    if where.reads == "[CLS]":
        shares[:, 0] = 1
    else:
        shares[:, where.prefix :] = 1 / (shares.shape[1] - where.prefix)
    return shares


def grid_distances(grid: Pair, step: Pair) -> np.ndarray:
    """Distances (N, N) in pixels between the patches of a grid, in raster order."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    down = (rows[:, None] - rows) * step[0]
    across = (columns[:, None] - columns) * step[1]
    return np.hypot(down, across)


def measure_heads(attention_BHTT: Tensor | np.ndarray, where: Layout) -> Heads:
    """How far and how evenly the patches of a layer look, head by head.

    Attention to [CLS] and registers has no distance: it is reported beside, and the rest is scaled to sum to 1. Where
    attention is masked, uniform means uniform over what may be looked at.
    """
    among = np.asarray(attention_BHTT, np.float64)[:, :, where.prefix :, where.prefix :]
    mass = among.sum(-1, keepdims=True)
    among = among / np.maximum(mass, 1e-300)
    distances = grid_distances(where.grid, where.step)
    allowed = np.ones_like(distances) if where.allowed is None else where.allowed.astype(np.float64)
    counts = allowed.sum(axis=1)
    distance = np.einsum("bhqk,qk->bh", among, distances) / len(distances)
    uniform = ((allowed * distances).sum(axis=1) / counts).mean()
    spread = -(among * np.log(np.maximum(among, 1e-300))).sum(-1) / np.log(np.maximum(counts, 2))
    return Heads(distance, distance / max(uniform, 1e-300), spread.mean(axis=2), 1 - mass[..., 0].mean(axis=2))


def entropy(shares: np.ndarray) -> float | None:
    """Entropy of a map as a share of the largest: 1 is flat, 0 is one place alone. An empty map has none."""
    values = np.asarray(shares, np.float64).ravel()
    if not values.sum():
        return None
    values = values / values.sum()
    return abs(float((values * np.log(np.maximum(values, 1e-300))).sum() / np.log(max(len(values), 2))))
