"""What can be measured of a model without training another: each quantity in its own units, with a known zero."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.core.settings import Pair
from vitrail.models.activations import evaluating, look
from vitrail.models.base import AnyModel

_BATCH = 250


class Conditions(NamedTuple):
    """What an encoding of positions is asked to be."""

    unique: float
    """The smallest distance between two places, as a share of the mean one; 0 if two are alike."""
    bounded: float
    """The largest absolute number in it."""
    uneven: float
    """The share of the variance of distances between places that their offset does not explain: 0 if equal offsets are
    equally far apart."""


def measure_conditions(pairs_NNM: np.ndarray, largest: float, grid: Pair) -> Conditions:
    """Conditions of an encoding by what it says of each pair of places: a distance (M = 1), or several numbers."""
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    down, right = rows[:, None] - rows, columns[:, None] - columns
    offset = ((down + grid[0]) * 2 * grid[1] + right + grid[1]).ravel()
    is_pair = offset != offset[0]  # a place with itself tells nothing
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
    return Conditions(unique, largest, float(within / total) if total > 1e-20 else 0.0)


def pairwise_distances(table_ND: np.ndarray) -> np.ndarray:
    """How far apart the encodings of places are, (N, N, 1)."""
    return np.linalg.norm(table_ND[:, None] - table_ND, axis=-1)[..., None]


def strength_by_place(model: AnyModel, images: Tensor, labels: Tensor, patch: Pair, order_N: Tensor) -> np.ndarray:
    """How strongly each patch moves the logit of the label, by its place in an order, (N): the mean norm of the
    gradient with respect to its pixels."""
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
def removal_effect_by_place(
    model: AnyModel, images: Tensor, labels: Tensor, patch: Pair, order_N: Tensor
) -> np.ndarray:
    """How much the logit of the label changes if a patch is that of the mean image, by its place in an order, (N)."""
    columns = images.shape[3] // patch[1]
    mean_image, effects = images.mean(dim=0), []
    with evaluating(model):
        logits = model(images).gather(1, labels[:, None])
        for place in order_N.tolist():
            down, right = place // columns * patch[0], place % columns * patch[1]
            at = (..., slice(down, down + patch[0]), slice(right, right + patch[1]))
            without = images.clone()
            without[at] = mean_image[at]
            effects.append(float((model(without).gather(1, labels[:, None]) - logits).abs().mean()))
    return np.array(effects)


def recency_index(strength_N: np.ndarray) -> float:
    """Where in a sequence the strength lies: 0 at its beginning, 0.5 evenly, 1 at its end."""
    return float((np.arange(len(strength_N)) * strength_N).sum() / ((len(strength_N) - 1) * strength_N.sum()))


@torch.no_grad()
def influence(model: AnyModel, layer: int) -> Tensor:
    """Whether a change of one patch changes any bit of a layer's output at another place: boolean (changed patch,
    place)."""
    config = model.config
    grid = config.grid or config.resolution
    patch = [side // count for side, count in zip(config.resolution, grid, strict=True)]
    # Two levels that even a pixel model's palette tells apart.
    base = torch.full((1, config.channels, *config.resolution), -0.9, dtype=next(model.parameters()).dtype)
    before = look(model, base, [layer], attention=False).steps[f"blocks.{layer}"]
    moved = []
    for row in range(0, config.resolution[0], patch[0]):
        for column in range(0, config.resolution[1], patch[1]):
            changed = base.clone()
            changed[..., row : row + patch[0], column : column + patch[1]] = 0.9
            after = look(model, changed, [layer], attention=False).steps[f"blocks.{layer}"]
            moved.append((after - before)[0, config.prefix :].abs().amax(-1) > 0)
    return torch.stack(moved)
