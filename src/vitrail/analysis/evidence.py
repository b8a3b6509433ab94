"""Evidence: how a prediction changes when parts of the image are removed, and whether a map predicts that.

A part is a cell of a grid (the patches, if the model has them). Removed cells are filled with the image's mean colour.
All values are probabilities of one class. This works for every family.
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
_SIDE, _MOST = 14, 24  # cells a side: usually, and at most


class Faith(NamedTuple):
    """Faithfulness of a map: the class's probability while cells are removed or inserted in its order."""

    deletion: float
    """Mean probability while cells are removed, highest first; lower is better."""
    insertion: float
    """Mean probability while cells are inserted into an empty image, highest first; higher is better."""


def evidence_grid(model: AnyModel) -> Pair:
    """Grid of the cells: the model's patches, or groups of them if there are more than 24 per side; 14 per side for a
    model without patches."""
    height, width = model.config.resolution
    grid = model.config.grid or (min(height, _SIDE), min(width, _SIDE))
    rows, columns = (side if side <= _MOST else -(-side // -(-side // _SIDE)) for side in grid)
    return rows, columns


def fill(image_CHW: Tensor, gone_KN: Tensor, grid: Pair) -> Tensor:
    """K copies of an image, or K images (K, C, H, W), each without the cells that its row of `gone_KN` marks. Sizes of
    cells may differ by a pixel."""
    height, width = image_CHW.shape[-2:]
    if grid[0] > height or grid[1] > width:
        raise UsageError(f"Grid must be within the image's {height} x {width} px, got {grid[0]} x {grid[1]}.")
    rows = torch.arange(height, device=image_CHW.device) * grid[0] // height
    columns = torch.arange(width, device=image_CHW.device) * grid[1] // width
    mask = gone_KN.view(-1, 1, *grid).to(image_CHW.dtype)[:, :, rows][..., columns]
    mean = image_CHW.mean(dim=(-2, -1), keepdim=True)
    return image_CHW * (1 - mask) + mean * mask


@torch.inference_mode()
def ask(
    model: AnyModel, image_CHW: Tensor, gone_KN: Tensor, grid: Pair, label: int, answer: DecisionRule = SINGLE_LABEL
) -> np.ndarray:
    """Probabilities (K) of a class for an image without the cells of each row of `gone_KN`."""
    answers = []
    with evaluating(model):
        for start in range(0, len(gone_KN), _BATCH):
            images = fill(image_CHW, gone_KN[start : start + _BATCH], grid)
            answers.append(answer.probabilities(model(images).float())[:, label].cpu().numpy())
    return np.concatenate(answers)


def occlusion(
    model: AnyModel, image_CHW: Tensor, label: int, grid: Pair, answer: DecisionRule = SINGLE_LABEL
) -> np.ndarray:
    """Occlusion map (h, w): how much the class's probability falls without each cell."""
    count = grid[0] * grid[1]
    gone = torch.cat([torch.zeros(1, count), torch.eye(count)]).to(image_CHW.device)
    answers = ask(model, image_CHW, gone, grid, label, answer)
    return (answers[0] - answers[1:]).reshape(grid)


def faith(
    model: AnyModel,
    image_CHW: Tensor,
    label: int,
    order_map: np.ndarray,
    grid: Pair,
    steps: int = 20,
    *,
    answer: DecisionRule = SINGLE_LABEL,
) -> Faith:
    """Deletion and insertion (arXiv 1806.07421) of a map (h, w) on cells."""
    order = np.argsort(-order_map.ravel(), kind="stable")
    count = len(order)
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    taken = np.round(np.linspace(0, count, min(steps, count) + 1)).astype(np.int64)
    deleted = torch.from_numpy(rank[None] < taken[:, None]).to(image_CHW.device)
    both = ask(model, image_CHW, torch.cat([deleted, ~deleted]), grid, label, answer)
    deletion, insertion = np.split(both, 2)
    return Faith(_area(taken / count, deletion), _area(taken / count, insertion))


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
    """The class's probability (shares, draws) without random shares of the cells, `draws` times each (arXiv
    2105.10497)."""
    count = grid[0] * grid[1]
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for share in shares:
        for _ in range(draws):
            gone = torch.zeros(count)
            gone[torch.randperm(count, generator=generator)[: round(share * count)]] = 1
            rows.append(gone)
    answers = ask(model, image_CHW, torch.stack(rows).to(image_CHW.device), grid, label, answer)
    return answers.reshape(len(shares), draws)


def to_cells(values: np.ndarray, grid: Pair) -> np.ndarray:
    """A map resized to the grid of cells: the mean over each cell, by area."""
    out = values
    for axis, cells in enumerate(grid):
        size = out.shape[axis]
        edges = np.linspace(0, size, cells + 1)
        weights = np.maximum(
            0, np.minimum(edges[1:, None], np.arange(1, size + 1)) - np.maximum(edges[:-1, None], np.arange(size))
        )
        weights /= weights.sum(axis=1, keepdims=True)
        out = np.moveaxis(np.tensordot(weights, out, axes=(1, axis)), 0, axis)
    return out


def _area(xs: np.ndarray, curve: np.ndarray) -> float:
    """The mean height of a curve, by the trapezoidal rule."""
    return float((np.diff(xs) * (curve[1:] + curve[:-1]) / 2).sum())
