"""What a model's position embeddings know of the image's rows and columns, and what its patch filters respond to."""

from typing import NamedTuple

import numpy as np
import torch

from vitrail.evaluation.transfer import Ridge
from vitrail.models.base import AnyModel
from vitrail.settings import Pair


class Structure(NamedTuple):
    """How two-dimensional a table of positions is."""

    additive: float
    """Share of its variance that is a row's part plus a column's part: R2_add."""
    additive_by_chance: float
    """What a random table of this grid has."""
    row: float
    """How well the row can be told from the embedding of a place that was left out, R2; 0 is a guess."""
    column: float
    """The same for the column; a table that knows only the raster order fails here."""


def position_table(model: AnyModel) -> np.ndarray | None:
    """What is added to each patch (or pixel), (N, D); None for kinds that act inside attention, and other families."""
    table = model.position_table()
    return None if table is None else table.detach().cpu().double().numpy()


def similarity(table_ND: np.ndarray) -> np.ndarray:
    """Cosine similarities (N, N) of the embeddings of all places. The mean is taken away first: an offset that all have
    would make everything similar."""
    centred = table_ND - table_ND.mean(axis=0)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    return unit @ unit.T


def structure(table_ND: np.ndarray, grid: Pair) -> Structure:
    """Numbers for what similarity tiles show."""
    rows, columns = grid
    cells = table_ND.reshape(rows, columns, -1)
    mean = cells.mean(axis=(0, 1))
    rest = cells - cells.mean(axis=1, keepdims=True) - cells.mean(axis=0, keepdims=True) + mean
    total = np.square(cells - mean).sum()
    additive = 1 - np.square(rest).sum() / total if total > 0 else 0.0
    row, column = np.divmod(np.arange(rows * columns), columns)
    chance = (rows + columns - 2) / max(rows * columns - 1, 1)
    return Structure(float(additive), chance, _decode(table_ND, row), _decode(table_ND, column))


def _decode(table_ND: np.ndarray, place: np.ndarray) -> float:
    """R2 of the place told by ridge regression from embeddings, each left out in turn."""
    spread = np.square(place - place.mean()).sum()
    if not spread or not table_ND.std():
        return 0.0
    system = Ridge(table_ND, place[:, None].astype(np.float64))
    return float(1 - np.square(system.left_out(system.choose())).sum() / spread)


def filters(model: AnyModel, count: int = 28) -> tuple[np.ndarray, np.ndarray] | None:
    """The first principal components of the patch embedding's kernels, (count, P, P, C) from 0 to 1, and the share of
    their variance that each has (Figure 7, left); None for families that project no patches of pixels."""
    kernel = model.pixel_kernels()
    if kernel is None:
        return None
    kernel = kernel.detach().cpu().double()
    flat = kernel.flatten(1)
    _, spread, parts = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    shown = parts[:count].unflatten(1, kernel.shape[1:]).permute(0, 2, 3, 1).numpy()
    low = shown.min(axis=(1, 2, 3), keepdims=True)
    high = shown.max(axis=(1, 2, 3), keepdims=True)
    share = spread.square() / spread.square().sum()
    return (shown - low) / np.maximum(high - low, 1e-12), share[:count].numpy()
