"""Evidence for a prediction: how the probability of a class changes when cells of the image are removed.

A cell is a rectangle of a grid; for models with patches, the grid is that of the patches. A removed cell is filled with
the image's mean colour. All values are probabilities of one class. Models of every family are supported.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.decision import SINGLE_LABEL, DecisionRule
from vitrail.core.errors import UsageError
from vitrail.core.settings import Pair
from vitrail.models.base import AnyModel
from vitrail.models.device import evaluating

_BATCH = 32
_DEFAULT_SIDE, _MAX_SIDE = 14, 24  # cells per side of the grid


class Fidelity(NamedTuple):
    """Fidelity of an attribution map: the probability of the class while cells are removed or inserted in its order."""

    deletion: float
    """Mean probability while cells are removed, highest first; lower is better."""
    insertion: float
    """Mean probability while cells are inserted into an empty image, highest first; higher is better."""


def evidence_grid(model: AnyModel) -> Pair:
    """Return the rows and columns of the grid of cells that evidence functions remove.

    The cells are the model's patches, or groups of patches if there are more than 24 per side. For a model without
    patches, there are 14 cells per side.
    """
    height, width = model.config.resolution
    grid = model.config.grid or (min(height, _DEFAULT_SIDE), min(width, _DEFAULT_SIDE))
    rows, columns = (side if side <= _MAX_SIDE else -(-side // -(-side // _DEFAULT_SIDE)) for side in grid)
    return rows, columns


def fill_cells(image_CHW: Tensor, removed_KN: Tensor, grid: Pair) -> Tensor:
    """Return K copies of an image in which marked cells are filled with the mean colour, (K, C, H, W).

    Row k of `removed_KN` is 1 for the cells to fill in copy k. `image_CHW` may also be a batch of K images. Cells may
    differ in size by a pixel.
    """
    height, width = image_CHW.shape[-2:]
    if grid[0] > height or grid[1] > width:
        raise UsageError(f"Grid must be within the image's {height} x {width} px, got {grid[0]} x {grid[1]}.")
    rows = torch.arange(height, device=image_CHW.device) * grid[0] // height
    columns = torch.arange(width, device=image_CHW.device) * grid[1] // width
    mask = removed_KN.view(-1, 1, *grid).to(image_CHW.dtype)[:, :, rows][..., columns]
    mean = image_CHW.mean(dim=(-2, -1), keepdim=True)
    return image_CHW * (1 - mask) + mean * mask


@torch.inference_mode()
def predict_without_cells(
    model: AnyModel, image_CHW: Tensor, removed_KN: Tensor, grid: Pair, label: int, answer: DecisionRule = SINGLE_LABEL
) -> np.ndarray:
    """Return the probabilities (K) of a class for an image without the cells that each row of `removed_KN` marks."""
    probabilities = []
    with evaluating(model):
        for start in range(0, len(removed_KN), _BATCH):
            images = fill_cells(image_CHW, removed_KN[start : start + _BATCH], grid)
            probabilities.append(answer.probabilities(model(images).float())[:, label].cpu().numpy())
    return np.concatenate(probabilities)


def occlusion(
    model: AnyModel, image_CHW: Tensor, label: int, grid: Pair, answer: DecisionRule = SINGLE_LABEL
) -> np.ndarray:
    """Return the occlusion map (h, w): how much the probability of the class falls without each cell."""
    count = grid[0] * grid[1]
    removed = torch.cat([torch.zeros(1, count), torch.eye(count)]).to(image_CHW.device)
    probabilities = predict_without_cells(model, image_CHW, removed, grid, label, answer)
    return (probabilities[0] - probabilities[1:]).reshape(grid)


def faith(
    model: AnyModel,
    image_CHW: Tensor,
    label: int,
    order_map: np.ndarray,
    grid: Pair,
    steps: int = 20,
    *,
    answer: DecisionRule = SINGLE_LABEL,
) -> Fidelity:
    """Return the deletion and insertion scores (arXiv 1806.07421) of an attribution map (h, w) of the cells."""
    order = np.argsort(-order_map.ravel(), kind="stable")
    count = len(order)
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    removed_counts = np.round(np.linspace(0, count, min(steps, count) + 1)).astype(np.int64)
    deleted = torch.from_numpy(rank[None] < removed_counts[:, None]).to(image_CHW.device)
    removed = torch.cat([deleted, ~deleted])
    deletion, insertion = np.split(predict_without_cells(model, image_CHW, removed, grid, label, answer), 2)
    shares = removed_counts / count
    return Fidelity(_area_under_curve(shares, deletion), _area_under_curve(shares, insertion))


def patch_drop(
    model: AnyModel,
    image_CHW: Tensor,
    label: int,
    grid: Pair,
    *,
    shares: Sequence[float],
    draws: int = 5,
    seed: int = 0,
    answer: DecisionRule = SINGLE_LABEL,
) -> np.ndarray:
    """Return the probability of the class when random shares of the cells are removed, (shares, draws).

    Each share is drawn `draws` times (arXiv 2105.10497).
    """
    count = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for share in shares:
        for _ in range(draws):
            removed = torch.zeros(count)
            removed[torch.randperm(count, generator=generator)[: round(share * count)]] = 1
            rows.append(removed)
    removed_KN = torch.stack(rows).to(image_CHW.device)
    probabilities = predict_without_cells(model, image_CHW, removed_KN, grid, label, answer)
    return probabilities.reshape(len(shares), draws)


def to_cells(values: np.ndarray, grid: Pair) -> np.ndarray:
    """Resize a map to the grid of cells. Each value is the mean of the map over a cell, weighted by area."""
    resized = values
    for axis, cells in enumerate(grid):
        size = resized.shape[axis]
        edges = np.linspace(0, size, cells + 1)
        weights = np.maximum(
            0, np.minimum(edges[1:, None], np.arange(1, size + 1)) - np.maximum(edges[:-1, None], np.arange(size))
        )
        weights /= weights.sum(axis=1, keepdims=True)
        resized = np.moveaxis(np.tensordot(weights, resized, axes=(1, axis)), 0, axis)
    return resized


def _area_under_curve(xs: np.ndarray, curve: np.ndarray) -> float:
    """Integrate a curve by the trapezoidal rule."""
    return float((np.diff(xs) * (curve[1:] + curve[:-1]) / 2).sum())
