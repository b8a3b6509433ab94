"""Analysis of position embeddings and of the filters of the patch embedding."""

from typing import NamedTuple

import numpy as np
import torch

from vitrail.core.least_squares import Ridge
from vitrail.core.settings import Pair
from vitrail.models.base import AnyModel
from vitrail.models.walkthrough import walkthrough_of


class PositionStructure(NamedTuple):
    """Measures of how well a table of position embeddings encodes rows and columns."""

    additive: float
    """Share of the variance of the table that a row term plus a column term explain."""
    additive_by_chance: float
    """Expected value of `additive` for a random table."""
    row: float
    """R2 of predicting the row of a held-out position from its embedding; 0 is chance."""
    column: float
    """R2 of predicting the column; it is low for a table that encodes only the raster index."""
    nearness: float
    """Correlation of the similarity of two embeddings with their nearness on the grid (Mantel's statistic)."""


def position_table(model: AnyModel) -> np.ndarray | None:
    """Return the position embedding that a model adds to each patch or pixel, (N, D).

    Return None for position embeddings that act inside attention, and for families without a table.
    """
    table = walkthrough_of(model).position_table()
    return None if table is None else table.detach().cpu().double().numpy()


def similarity(table_ND: np.ndarray) -> np.ndarray:
    """Return the cosine similarities (N, N) of all position embeddings.

    The mean embedding is subtracted first: a common offset would make all embeddings similar.
    """
    centred = table_ND - table_ND.mean(axis=0)
    unit = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
    return unit @ unit.T


def structure(table_ND: np.ndarray, grid: Pair) -> PositionStructure:
    """Measure how well a position table (N, D) encodes the rows and columns of a grid."""
    rows, columns = grid
    cells = table_ND.reshape(rows, columns, -1)
    mean = cells.mean(axis=(0, 1))
    residual = cells - cells.mean(axis=1, keepdims=True) - cells.mean(axis=0, keepdims=True) + mean
    total = np.square(cells - mean).sum()
    additive = 1 - np.square(residual).sum() / total if total > 0 else 0.0
    row, column = np.divmod(np.arange(rows * columns), columns)
    chance = (rows + columns - 2) / max(rows * columns - 1, 1)
    decoding = (_decoding_r2(table_ND, coordinate) for coordinate in (row, column))
    return PositionStructure(float(additive), chance, *decoding, _nearness(table_ND, row, column))


def _nearness(table_ND: np.ndarray, row: np.ndarray, column: np.ndarray) -> float:
    """Return the correlation over all pairs of positions of cosine similarity and negative distance on the grid."""
    pairs = np.triu_indices(len(table_ND), 1)
    distances = np.hypot(*(coordinate[pairs[0]] - coordinate[pairs[1]] for coordinate in (row, column)))
    similarities = similarity(table_ND)[pairs]
    if not similarities.std() or not distances.std():
        return 0.0
    return float(-np.corrcoef(similarities, distances)[0, 1])


def _decoding_r2(table_ND: np.ndarray, coordinate: np.ndarray) -> float:
    """Return the leave-one-out R2 of predicting the row or column (N) from the embedding by ridge regression."""
    variation = np.square(coordinate - coordinate.mean()).sum()
    if not variation or not table_ND.std():
        return 0.0
    system = Ridge(table_ND, coordinate[:, None].astype(np.float64))
    return float(1 - np.square(system.leave_one_out_errors(system.choose_penalty())).sum() / variation)


def filters(model: AnyModel, count: int = 28) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first principal components of the patch embedding's kernels, and their shares of the variance.

    Components are (count, P, P, C), scaled to 0..1, as in Figure 7 (left) of the paper. Return None for a family
    without a patch embedding.
    """
    if not model.projection:
        return None
    kernel = model.get_parameter(f"{model.projection}.weight").detach().cpu().double()
    flat = kernel.flatten(1)
    _, singular_values, directions = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    components = directions[:count].unflatten(1, kernel.shape[1:]).permute(0, 2, 3, 1).numpy()
    low = components.min(axis=(1, 2, 3), keepdims=True)
    high = components.max(axis=(1, 2, 3), keepdims=True)
    share = singular_values.square() / singular_values.square().sum()
    return (components - low) / np.maximum(high - low, 1e-12), share[:count].numpy()
