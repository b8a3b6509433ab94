"""Attention in numbers: how far heads look, how evenly, what flows from where to where.

Shapes: B images, H heads, T tokens of which the first are [CLS] and registers, N = h*w patches.
"""

import contextlib
import functools
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import UsageError
from vitrail.models.base import AnyModel
from vitrail.models.igpt import IGPT
from vitrail.models.layers import Attention, attention_weights
from vitrail.models.look import evaluating
from vitrail.models.vit import ViT
from vitrail.settings import Pair


class Layout(NamedTuple):
    """Where the tokens of a model stand in the picture."""

    grid: Pair
    """Rows and columns of patches (or pixels)."""
    step: Pair
    """Pixels from one to the next."""
    prefix: int
    """[CLS] and registers, which stand before them and nowhere in the picture."""
    has_class: bool
    """Whether the head reads [CLS]; else the mean of all places."""

    def read(self, weights_TT: np.ndarray) -> np.ndarray:
        """Where that looks, which the head reads: (..., T, T) to (..., h, w)."""
        row = weights_TT[..., 0, :] if self.has_class else weights_TT[..., self.prefix :, :].mean(axis=-2)
        return row[..., self.prefix :].reshape(*row.shape[:-1], *self.grid)


def layout(model: AnyModel) -> Layout | None:
    """The layout of a model whose places attend to each other; None for other families."""
    c = model.config
    if isinstance(model, ViT):
        step = (c.step[0] * c.canvas_scale, c.step[1] * c.canvas_scale)
        return Layout(c.grid, step, c.prefix, c.pool == "cls")
    return Layout(c.grid, (1, 1), 0, has_class=False) if isinstance(model, IGPT) else None


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


def grid_distances(grid: Pair, step: Pair) -> np.ndarray:
    """Distances (N, N) in pixels between the patches of a grid, in raster order."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    down = (rows[:, None] - rows) * step[0]
    across = (columns[:, None] - columns) * step[1]
    return np.hypot(down, across)


def measure_heads(attention_BHTT: Tensor | np.ndarray, where: Layout) -> Heads:
    """How far and how evenly the patches of a layer look, head by head.

    Attention to [CLS] and registers has no distance: it is reported beside, and the rest is scaled to sum to 1.
    """
    among = np.asarray(attention_BHTT, np.float64)[:, :, where.prefix :, where.prefix :]
    mass = among.sum(-1, keepdims=True)
    among = among / np.maximum(mass, 1e-300)
    distances = grid_distances(where.grid, where.step)
    distance = np.einsum("bhqk,qk->bh", among, distances) / len(distances)
    plogp = among * np.log(np.maximum(among, 1e-300))
    largest = np.log(max(among.shape[-1], 2))
    return Heads(
        distance, distance / max(distances.mean(), 1e-300), -plogp.sum(-1).mean(axis=2) / largest,
        1 - mass[..., 0].mean(axis=2),
    )  # fmt: skip


def rollout(attentions: Sequence[Tensor]) -> Tensor:
    """What reaches each token from each first one, (B, T, T), if attention and residuals were all there is (arXiv
    2005.00928): the product of (mean over heads + identity), rows scaled to 1, over the layers."""
    if not attentions:
        raise UsageError("Rollout must have the attention of at least one layer, got none.")
    flow = None
    for attention_BHTT in attentions:
        step = attention_BHTT.double().mean(dim=1)
        step = step + torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
        step = step / step.sum(dim=-1, keepdim=True)
        flow = step if flow is None else step @ flow
    assert flow is not None
    return flow


def relevance(model: AnyModel, images: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """How much each patch speaks for a class, (B, N), and the classes (B): attention weighted by the gradient of the
    class's logit, negative parts cut off, added up over the layers (arXiv 2103.15679, eqs. 5 and 6).

    By default the class that the model answers. The map is the row of what the head reads: [CLS], else the mean.
    """
    where = layout(model)
    if where is None:
        raise UsageError(f"Relevance must be asked of a model with attention, got family {model.config.family}.")
    with evaluating(model), torch.enable_grad(), attention_written_out(model) as kept:
        logits = model(images)
        if classes is None:
            classes = logits.argmax(dim=-1)
        chosen = logits.gather(1, classes[:, None].to(logits.device)).sum()
        gradients = torch.autograd.grad(chosen, kept)
    tokens = kept[0].shape[-1]
    flow = torch.eye(tokens, dtype=torch.float64, device=images.device).expand(len(images), -1, -1).clone()
    for weights, gradient in zip(kept, gradients, strict=True):
        step = (weights * gradient).clamp(min=0).double().mean(dim=1).detach()  # (B, Q, T): the last layer may ask one
        flow[:, : step.shape[1]] += step @ flow
    row = flow[:, 0] if where.has_class else flow[:, where.prefix :].mean(dim=1)
    return row[:, where.prefix :].float(), classes


@contextlib.contextmanager
def attention_written_out(model: AnyModel) -> Generator[list[Tensor]]:
    """For a while, attention is computed as eqs. 6 and 7 are written, so that its weights have gradients. They are
    collected, layer by layer, in the list that is given."""
    kept: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer in layers:
        layer.forward = functools.partial(_attend, layer, kept)
    try:
        yield kept
    finally:
        for layer in layers:
            del layer.forward


def _attend(
    layer: Attention,
    kept: list[Tensor],
    x_BND: Tensor,
    rope: Tensor | None = None,
    bias: Tensor | None = None,
    queries: int | None = None,
) -> Tensor:
    q, k, v = layer._qkv(x_BND, rope, queries)
    weights = attention_weights(q, k, bias if bias is None or queries is None else bias[..., :queries, :])
    if not weights.requires_grad and torch.is_grad_enabled():
        weights = weights.detach().requires_grad_()  # in a frozen model, gradients begin here
    kept.append(weights)
    return layer.proj((weights @ v).transpose(1, 2).flatten(2))


def entropy(shares: np.ndarray) -> float:
    """Entropy of a map as a share of the largest: 1 is flat, and then its shape means nothing."""
    values = np.asarray(shares, np.float64).ravel()
    values = values / max(values.sum(), 1e-300)
    return float(-(values * np.log(np.maximum(values, 1e-300))).sum() / np.log(max(len(values), 2)))
