"""Measures of positions in a model: properties of position encodings, and the influence of each patch position."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.core.settings import Pair
from vitrail.models.activations import look
from vitrail.models.base import AnyModel
from vitrail.models.device import evaluating

_BATCH = 250


class EncodingProperties(NamedTuple):
    """Properties of a position encoding."""

    unique: float
    """Smallest distance between two positions relative to the mean distance. 0 if two encodings are equal."""
    bounded: float
    """Largest absolute value of the encoding."""
    uneven: float
    """Share of the variance of distances that offsets do not explain. 0 if equal offsets have equal distances."""


def measure_encoding(pairs_NNM: np.ndarray, largest: float, grid: Pair) -> EncodingProperties:
    """Compute the properties of a position encoding from M numbers for each pair of the N positions.

    With M = 1, the number is a distance. `largest` is the largest absolute value of the encoding.
    """
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    down, right = rows[:, None] - rows, columns[:, None] - columns
    offset = ((down + grid[0]) * 2 * grid[1] + right + grid[1]).ravel()
    is_pair = offset != offset[0]  # exclude pairs of a position with itself
    values, (_, group) = pairs_NNM.reshape(len(offset), -1)[is_pair], np.unique(offset[is_pair], return_inverse=True)
    means = np.stack([np.bincount(group, column) for column in values.T], 1) / np.bincount(group)[:, None]
    total = np.square(values - values.mean(axis=0)).sum()
    within = np.square(values - means[group]).sum()
    if pairs_NNM.shape[2] == 1:
        separations = values[:, 0]
    else:
        first, second = np.triu_indices(len(means), 1)
        separations = np.linalg.norm(means[first] - means[second], axis=1)
    unique = float(separations.min() / separations.mean()) if separations.mean() > 0 else 0.0
    return EncodingProperties(unique, largest, float(within / total) if total > 1e-20 else 0.0)


def pairwise_distances(table_ND: np.ndarray) -> np.ndarray:
    """Return the distances between the encodings of all positions, (N, N, 1)."""
    return np.linalg.norm(table_ND[:, None] - table_ND, axis=-1)[..., None]


def strength_by_position(model: AnyModel, images: Tensor, labels: Tensor, patch: Pair, order_N: Tensor) -> np.ndarray:
    """Return the mean gradient norm of the label's logit with respect to the pixels of each patch (N).

    Patches are in the order `order_N`, raster indices in the order of reading.
    """
    sums = np.zeros(len(order_N))
    with torch.enable_grad(), evaluating(model):
        for batch, batch_labels in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
            pixels = batch.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(model(pixels).gather(1, batch_labels[:, None]).sum(), pixels)
            heights, widths = gradient.shape[2] // patch[0], gradient.shape[3] // patch[1]
            squares = gradient.double().square().sum(1).view(-1, heights, patch[0], widths, patch[1]).sum((2, 4))
            sums += squares.sqrt().flatten(1)[:, order_N].sum(0).numpy()
    return sums / len(images)


@torch.no_grad()
def removal_effect_by_position(
    model: AnyModel, images: Tensor, labels: Tensor, patch: Pair, order_N: Tensor
) -> np.ndarray:
    """Return the mean change of the label's logit if a patch is replaced by that of the mean image (N).

    Patches are in the order `order_N`, raster indices in the order of reading.
    """
    columns = images.shape[3] // patch[1]
    mean_image, effects = images.mean(dim=0), []
    with evaluating(model):
        logits = model(images).gather(1, labels[:, None])
        for index in order_N.tolist():
            down, right = index // columns * patch[0], index % columns * patch[1]
            region = (..., slice(down, down + patch[0]), slice(right, right + patch[1]))
            replaced = images.clone()
            replaced[region] = mean_image[region]
            effects.append(float((model(replaced).gather(1, labels[:, None]) - logits).abs().mean()))
    return np.array(effects)


def recency_index(strength_N: np.ndarray) -> float:
    """Return the centre of mass of patch influence in a sequence: 0 at its start, 0.5 if even, 1 at its end."""
    return float((np.arange(len(strength_N)) * strength_N).sum() / ((len(strength_N) - 1) * strength_N.sum()))


@torch.no_grad()
def influence_matrix(model: AnyModel, layer: int) -> Tensor:
    """Return whether a change of each patch changes a layer's output at each position: boolean (patch, position)."""
    config = model.config
    grid = config.grid or config.resolution
    patch = [side // count for side, count in zip(config.resolution, grid, strict=True)]
    # Two grey levels that a model of palette colours distinguishes, too.
    base = torch.full((1, config.channels, *config.resolution), -0.9, dtype=next(model.parameters()).dtype)
    output_before = look(model, base, [layer], attention=False).steps[f"blocks.{layer}"]
    influences = []
    for row in range(0, config.resolution[0], patch[0]):
        for column in range(0, config.resolution[1], patch[1]):
            changed = base.clone()
            changed[..., row : row + patch[0], column : column + patch[1]] = 0.9
            output_after = look(model, changed, [layer], attention=False).steps[f"blocks.{layer}"]
            influences.append((output_after - output_before)[0, config.prefix :].abs().amax(-1) > 0)
    return torch.stack(influences)
