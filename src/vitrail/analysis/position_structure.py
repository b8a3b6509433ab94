"""Analysis of position embeddings and of patch embedding filters."""

from typing import NamedTuple

import numpy as np
import torch

from vitrail.core.least_squares import Ridge
from vitrail.core.settings import Pair
from vitrail.models.base import AnyModel
from vitrail.models.walkthrough import walkthrough_of


class Structure(NamedTuple):
    """How well a position table encodes rows and columns."""

    additive: float
    """Share of its variance explained by a row term plus a column term."""
    additive_by_chance: float
    """The same for a random table."""
    row: float
    """R2 of predicting the row from the embedding of a held-out position; 0 is chance."""
    column: float
    """The same for the column; a table that encodes only the raster index fails here."""


def position_table(model: AnyModel) -> np.ndarray | None:
    """The position embedding that is added to each patch or pixel (N, D); None for kinds that act inside attention, and
    for other families."""
    table = walkthrough_of(model).position_table()
    return None if table is None else table.detach().cpu().double().numpy()


def similarity(table_ND: np.ndarray) -> np.ndarray:
    """Cosine similarities (N, N) of all position embeddings. The mean is subtracted first, because a common offset
    would make all of them similar."""
    centred = table_ND - table_ND.mean(axis=0)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    return unit @ unit.T


def structure(table_ND: np.ndarray, grid: Pair) -> Structure:
    """Row and column structure of a position table."""
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
    """Leave-one-out R2 of predicting the row or column from the embedding by ridge regression."""
    spread = np.square(place - place.mean()).sum()
    if not spread or not table_ND.std():
        return 0.0
    system = Ridge(table_ND, place[:, None].astype(np.float64))
    return float(1 - np.square(system.leave_one_out_errors(system.choose_penalty())).sum() / spread)


def filters(model: AnyModel, count: int = 28) -> tuple[np.ndarray, np.ndarray] | None:
    """The first principal components of the patch embedding's kernels, (count, P, P, C) scaled to 0..1, and their
    shares of the variance (Figure 7, left); None for families without a patch embedding."""
    if not model.projection:
        return None
    kernel = model.get_parameter(f"{model.projection}.weight").detach().cpu().double()
    flat = kernel.flatten(1)
    _, spread, parts = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    shown = parts[:count].unflatten(1, kernel.shape[1:]).permute(0, 2, 3, 1).numpy()
    low = shown.min(axis=(1, 2, 3), keepdims=True)
    high = shown.max(axis=(1, 2, 3), keepdims=True)
    share = spread.square() / spread.square().sum()
    return (shown - low) / np.maximum(high - low, 1e-12), share[:count].numpy()
