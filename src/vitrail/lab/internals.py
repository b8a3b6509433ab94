"""Measurements inside a model: attention distances, receptive areas, equivariance errors, and similarity of layers.

Except for the similarity, every measure has one value per image.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.heads import measure_heads
from vitrail.analysis.layers import cka_table, layer_grams
from vitrail.analysis.receptive_field import reaches
from vitrail.lab.perturbations import index_batches
from vitrail.lab.statistics import Estimate
from vitrail.models.activations import look
from vitrail.models.base import AnyModel


def head_distances(model: AnyModel, images: Tensor) -> dict[int, np.ndarray]:
    """Return the attention distance of each head by layer, (n, heads), relative to uniform attention.

    The result is empty for families without attention between positions.
    """
    layout = model.layout()
    if layout is None:
        return {}
    distances: dict[int, list[np.ndarray]] = {}
    for layer, attention in _attention_batches(model, images):
        distances.setdefault(layer, []).append(measure_heads(attention, layout).of_uniform)
    return {layer: np.concatenate(parts) for layer, parts in distances.items()}


def _attention_batches(model: AnyModel, images: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield layers and their attention (n, heads, T, T), in batches of images."""
    for batch in images.split(max(1, min(32, 200_000 // (model.config.tokens or 1) ** 2))):
        for layer, attention in look(model, batch).attention.items():
            yield layer, attention.cpu()


def head_differences(model: AnyModel, images: Tensor) -> dict[int, float]:
    """Return how much the heads of each layer with several heads differ: 0 if they are equal, 1 if they never overlap.

    It is the total variation distance between the attention of two heads, both averaged over the images: the mean over
    all tokens that attend and over all pairs of heads. The result is empty for families without attention between
    positions.
    """
    if model.layout() is None:
        return {}
    sums_HTT: dict[int, np.ndarray] = {}
    for layer, attention in _attention_batches(model, images):
        sums_HTT[layer] = sums_HTT.get(layer, 0.0) + attention.double().sum(dim=0).numpy()
    return {layer: _mean_difference(sums / len(images)) for layer, sums in sums_HTT.items() if len(sums) > 1}


def _mean_difference(maps_HTT: np.ndarray) -> float:
    """Return the mean total variation distance over pairs of heads."""
    distances = [np.abs(first - second).sum(axis=1).mean() / 2 for first, second in itertools.combinations(maps_HTT, 2)]
    return float(np.mean(distances))


def receptive_areas(
    model: AnyModel, images: Tensor, layers: Sequence[int], share: float = 0.5
) -> dict[int, np.ndarray]:
    """Return the receptive area of each layer for each image (n), as a share of the image.

    It is the smallest square around the centre that holds `share` of the gradient of the layer's output at the centre.
    """
    fields = [reaches(model, image, layers, draws=4) for image in images.split(1)]
    return {layer: np.array([field[layer].areas([share])[share] for field in fields]) for layer in layers}


def third_layer(depth: int) -> int:
    """Return the index of the layer at a third of the depth."""
    return max(round(depth / 3), 1) - 1


def equivariance_errors(model: AnyModel, images: Tensor, distances: Sequence[int]) -> dict[str, dict[int, np.ndarray]]:
    """Return the equivariance error of each spatial layer, and of `pooled`, by distance, one value per image.

    The error compares the features of the shifted image with the shifted features: 0 means equivariant (for `pooled`,
    invariant), 1 as different as the features of unrelated images. Images are rolled along each axis. If a distance is
    not a multiple of a layer's stride, its features are shifted by linear interpolation. Positions near the border are
    excluded, because rolled pixels reach them.
    """
    original_maps = _layer_maps(model, images)
    spread = {
        name: 2 * float((maps - maps.mean(dim=(0, 2, 3), keepdim=True)).square().sum(1).mean())
        for name, maps in original_maps.items()
    }
    errors: dict[str, dict[int, np.ndarray]] = {name: {} for name in original_maps}
    for distance in distances:
        parts: dict[str, list[Tensor]] = {}
        for axis in (2, 3):
            for name, shifted in _layer_maps(model, images.roll(distance, axis)).items():
                positions = original_maps[name].shape[axis]
                steps = 0.0 if name == "pooled" else distance * positions / images.shape[axis]
                expected = _roll(original_maps[name], steps, axis)
                border = int(np.ceil(steps - 1e-9))
                if positions <= 2 * border:
                    continue
                error = (shifted - expected).square().sum(1).narrow(axis - 1, border, positions - 2 * border)
                parts.setdefault(name, []).append(error.mean(dim=(1, 2)))
        for name, axis_errors in parts.items():
            errors[name][distance] = torch.stack(axis_errors).mean(0).numpy() / max(spread[name], 1e-300)
    return errors


def _layer_maps(model: AnyModel, images: Tensor) -> dict[str, Tensor]:
    """Return the output of every spatial layer, (n, D, h, w), and the pooled features, (n, D, 1, 1)."""
    maps: dict[str, list[Tensor]] = {}
    config = model.config
    for numbers in index_batches(model, len(images)):
        steps = look(model, images[numbers[0] : numbers[-1] + 1], attention=False).steps
        for name, output in steps.items():
            if name == "pooled" and output.ndim == 2:
                maps.setdefault(name, []).append(output[:, :, None, None])
            elif name.startswith("blocks.") and output.ndim == 4:
                maps.setdefault(name, []).append(output)
            elif name.startswith("blocks.") and output.ndim == 3 and config.grid is not None:
                tokens = output[:, config.prefix :].transpose(1, 2)
                maps.setdefault(name, []).append(tokens.unflatten(2, config.grid))
    return {name: torch.cat(parts).double().cpu() for name, parts in maps.items()}


def _roll(maps: Tensor, steps: float, axis: int) -> Tensor:
    """Roll feature maps along an axis. A fraction of a step is interpolated linearly."""
    full_steps = int(np.floor(steps + 1e-9))
    fraction = max(steps - full_steps, 0.0)
    rolled = maps.roll(full_steps, axis)
    return rolled if fraction < 1e-9 else (1 - fraction) * rolled + fraction * maps.roll(full_steps + 1, axis)


class Similarity(NamedTuple):
    """CKA between all layers of a model."""

    table: np.ndarray
    leave_one_out: np.ndarray
    """Mean over pairs of different layers, leaving out one batch of images at a time (batches)."""

    def estimate(self) -> Estimate:
        """Return the mean over pairs of different layers with its jackknife error over batches."""
        return jackknife(_mean_off_diagonal(self.table), self.leave_one_out)


def layer_similarity(model: AnyModel, images: Tensor) -> Similarity | None:
    """Return the CKA between layers. None for a model with one layer or for fewer than 32 images."""
    if model.config.depth < 2 or len(images) < 32:
        return None
    grams = layer_grams(model, images, batch=16)
    batches = len(next(iter(grams.values())))

    def table(left_out: int | None) -> np.ndarray:
        remaining = {
            name: [gram for index, gram in enumerate(batch_grams) if index != left_out]
            for name, batch_grams in grams.items()
        }
        return cka_table(remaining, remaining)

    return Similarity(table(None), np.array([_mean_off_diagonal(table(index)) for index in range(batches)]))


def _mean_off_diagonal(table: np.ndarray) -> float:
    return float(table[~np.eye(len(table), dtype=bool)].mean())


def jackknife(value: float, leave_one_out: np.ndarray) -> Estimate:
    """Return an estimate with its jackknife error from the values that leave out one group each."""
    count = len(leave_one_out)
    variance = (count - 1) / count * float(np.square(leave_one_out - leave_one_out.mean()).sum())
    return Estimate(value, float(np.sqrt(variance)), count - 1)


def round_values(values: np.ndarray) -> list[Any]:
    """Round numbers to five significant digits, to store them as JSON."""
    return [float(f"{value:.5g}") for value in values]
