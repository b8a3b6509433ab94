"""Perturbed images and a model's predictions for them: shifts, shuffled blocks, dropped patches, frequency filters.

Each measure has one value per image. The measure is their mean, its interval follows from their spread, and two models
are compared on the same images. Shapes: B images of a batch, C channels, H x W pixels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.evidence import fill_cells
from vitrail.core import rng
from vitrail.core.settings import Pair
from vitrail.evaluation.metrics import calibration_error
from vitrail.inference.engine import batch_for
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import pack, unpack
from vitrail.models.base import AnyModel
from vitrail.models.device import evaluating

Perturbation = Callable[[Tensor, np.ndarray], Tensor]
"""Function of images (B, C, H, W) and their indices (B). Random choices depend on the indices only."""

DROP_SHARES = (0.25, 0.5, 0.75)
"""Shares of the grid that are dropped."""
BANDS = (0.125, 0.25, 0.5)
"""Cut-off frequencies of the filters, as shares of the highest frequency."""
_DRAWS = 2  # shifts of each image at each distance


# Perturbations


def shift(images: Tensor, down: np.ndarray, right: np.ndarray) -> Tensor:
    """Shift each image by `down` and `right` pixels (B). Pixels from outside are mirrored at the border."""
    sides = [_mirrored_indices(size, pixels) for size, pixels in zip(images.shape[2:], (down, right), strict=True)]
    rows, columns = (torch.from_numpy(side).to(images.device) for side in sides)
    each = torch.arange(len(images), device=images.device)[:, None, None]
    return images[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _mirrored_indices(size: int, pixels: np.ndarray) -> np.ndarray:
    """Return the source index of each pixel along a side (B, size)."""
    indices = np.abs(np.arange(size) - pixels[:, None])
    return np.where(indices > size - 1, 2 * (size - 1) - indices, indices)


def shift_distances(side: int) -> tuple[int, ...]:
    """Return shift distances in pixels: 1/28 to 4/28 of the side, which is 1 to 4 px of a small image."""
    return tuple(sorted({max(round(part * side / 28), 1) for part in (1, 2, 3, 4)}))


def ring_shift(distance: int, draw: int = 0) -> Perturbation:
    """Return a perturbation that shifts each image to a random point at Chebyshev distance `distance`."""

    def perturb(images: Tensor, numbers: np.ndarray) -> Tensor:
        index = rng.integers(8 * distance, distance, draw, numbers, stream="lab shift")
        side, along = np.divmod(index, 2 * distance)
        far, near = np.full_like(along, distance), along - distance
        down = np.select([side == 0, side == 1, side == 2], [-far, near, far], -near)
        right = np.select([side == 0, side == 1, side == 2], [near, far, -near], -far)
        return shift(images, down, right)

    return perturb


def shuffle(grid: Pair) -> Perturbation:
    """Return a perturbation that puts the blocks of a grid in a random order, different for each image."""

    def perturb(images: Tensor, numbers: np.ndarray) -> Tensor:
        blocks = grid[0] * grid[1]
        keys = rng.bits(blocks, numbers[:, None], np.arange(blocks), stream="lab shuffle")
        order = torch.from_numpy(np.argsort(keys, axis=1)).to(images.device)
        batch, channels, height, width = images.shape
        tall, wide = height // grid[0], width // grid[1]
        block_pixels = (
            images.view(batch, channels, grid[0], tall, grid[1], wide).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        )
        shuffled = block_pixels[torch.arange(batch, device=images.device)[:, None], order]
        return shuffled.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)

    return perturb


def shuffle_grids(*resolutions: Pair) -> list[Pair]:
    """Return grids that divide images of all these resolutions, from 2 x 2 up, each about twice as fine."""
    grids: list[Pair] = []
    for side in range(2, min(min(sizes) for sizes in resolutions) + 1):
        fits = all(height % side == 0 and width % side == 0 for height, width in resolutions)
        if fits and side <= 16 and (not grids or side >= 1.7 * grids[-1][0]):
            grids.append((side, side))
    return grids


def drop(share: float, grid: Pair) -> Perturbation:
    """Return a perturbation that fills a random share of a grid with the image's mean colour."""

    def perturb(images: Tensor, numbers: np.ndarray) -> Tensor:
        count = grid[0] * grid[1]
        keys = rng.bits(count, numbers[:, None], np.arange(count), stream="lab drop")
        is_dropped = np.argsort(np.argsort(keys, axis=1), axis=1) < round(share * count)
        return fill_cells(images, torch.from_numpy(is_dropped).to(images.device), grid)

    return perturb


def low_pass(band: float) -> Perturbation:
    """Return a filter that keeps frequencies up to `band`, a share of the highest frequency of the shorter side."""
    return lambda images, _numbers: _filter_frequencies(images, lambda frequency: frequency <= band)


def high_pass(band: float) -> Perturbation:
    """Return a filter that keeps frequencies above `band` and the mean colour."""
    return lambda images, _numbers: _filter_frequencies(images, lambda frequency: (frequency > band) | (frequency == 0))


def _filter_frequencies(images: Tensor, keeps: Callable[[Tensor], Tensor]) -> Tensor:
    """Remove all frequencies of images for which `keeps` is False."""
    height, width = images.shape[2:]
    rows, columns = torch.fft.fftfreq(height), torch.fft.rfftfreq(width)
    frequency = torch.hypot(rows[:, None], columns) * 2  # 1 is one cycle per two pixels
    mask = keeps(frequency).to(images.device, images.dtype)
    return torch.fft.irfft2(torch.fft.rfft2(images) * mask, s=(height, width))


# Predictions


class PerturbedPredictions(NamedTuple):
    """Predictions for perturbed images, one per image."""

    right: np.ndarray
    """Whether the prediction is correct."""
    same: np.ndarray
    """Whether the prediction equals that for the unperturbed image."""

    def to_json(self) -> dict[str, str]:
        """Return both arrays as text."""
        return {"right": pack(self.right), "same": pack(self.same)}

    @classmethod
    def from_json(cls, fields: Mapping[str, str], count: int) -> "PerturbedPredictions":
        """Return the predictions in a document of `to_json`."""
        return cls(*(unpack(fields[name], count).astype(bool) for name in cls._fields))


@torch.inference_mode()
def predict_probabilities(model: AnyModel, images: Tensor, perturbation: Perturbation | None = None) -> np.ndarray:
    """Return the class probabilities of images, or of perturbed images (n, classes)."""
    parts = []
    with evaluating(model):
        for numbers in index_batches(model, len(images)):
            batch = images[numbers[0] : numbers[-1] + 1]
            parts.append(
                model(batch if perturbation is None else perturbation(batch, numbers)).float().softmax(-1).cpu().numpy()
            )
    return np.concatenate(parts)


def predict_perturbed(
    model: AnyModel, images: Tensor, labels: np.ndarray, perturbations: Mapping[str, Perturbation], *, plain: np.ndarray
) -> Iterator[tuple[str, PerturbedPredictions]]:
    """Yield the predictions under every perturbation. `plain` holds the predictions for unperturbed images (n)."""
    for name, perturbation in perturbations.items():
        predicted = predict_probabilities(model, images, perturbation).argmax(axis=1)
        yield name, PerturbedPredictions(predicted == labels, predicted == plain)


def shift_perturbations(distances: Iterable[int]) -> dict[str, Perturbation]:
    """Return shifts of every distance, several draws of each: `shift 2 1` is the second draw of two pixels."""
    return {f"shift {far} {draw}": ring_shift(far, draw) for far in distances for draw in range(_DRAWS)}


def other_perturbations(grids: Sequence[Pair], drop_grid: Pair) -> dict[str, Perturbation]:
    """Return the perturbations by shuffled blocks, dropped patches and filters."""
    return {
        **{f"shuffle {grid[0]}": shuffle(grid) for grid in grids},
        **{f"drop {share:g}": drop(share, drop_grid) for share in DROP_SHARES},
        **{f"low {band:g}": low_pass(band) for band in BANDS},
        **{f"high {band:g}": high_pass(band) for band in BANDS},
    }


CURVES = ("shuffle", "drop", "low", "high")
"""First words of the names in `other_perturbations`. Each group is drawn as a curve."""


def curve_points(kind: str, names: Iterable[str]) -> list[tuple[float, str]]:
    """Return the points of a curve as (x, name of the perturbation).

    x is the number of blocks per side, or the percentage of patches or of frequencies.

    The unperturbed image has an empty name and is included at its x.
    """
    scale, unchanged = {"shuffle": (1, 1), "drop": (100, 0), "low": (100, 100), "high": (100, 0)}[kind]
    points = [(scale * float(name.partition(" ")[2]), name) for name in names if name.startswith(f"{kind} ")]
    return sorted([*points, (float(unchanged), "")])


def shift_values(
    predictions: Mapping[str, PerturbedPredictions], right: np.ndarray, far: int | None = None
) -> dict[str, np.ndarray]:
    """Return accuracy and consistency of each image, averaged over shifts of one distance or of all.

    Consistency is the share of predictions that stay the same, among images that are correct without a shift.
    """
    selected = [
        prediction
        for name, prediction in predictions.items()
        if name.startswith("shift" if far is None else f"shift {far} ")
    ]
    same = np.mean([prediction.same for prediction in selected], axis=0)
    return {
        "accuracy": np.mean([prediction.right for prediction in selected], axis=0),
        "consistency": linearised_ratio(same * right, right.astype(float)),
    }


def linearised_ratio(parts: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Return one value per image with mean sum(parts) / sum(totals) and the spread of that ratio (linearised)."""
    if not totals.sum():
        return np.zeros(len(totals))
    share = parts.sum() / totals.sum()
    return share + (parts - share * totals) / totals.mean()


def mean_of(values: np.ndarray) -> Estimate:
    """Return the mean over images with its standard error."""
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))), len(values) - 1)


class CalibrationMeasure(NamedTuple):
    """Agreement of a model's confidence with its accuracy."""

    error: Estimate
    """Expected calibration error over 15 bins, with a bootstrap error over images."""
    expected_error: float
    """Calibration error of a perfectly calibrated model with these confidences on the same number of images."""
    overconfidence: np.ndarray
    """Confidence minus correctness (0 or 1) of each image."""


def measure_calibration(probabilities: np.ndarray, right: np.ndarray, draws: int = 200) -> CalibrationMeasure:
    """Measure calibration from probabilities (n, classes) and correctness (n)."""
    confidences = probabilities.max(axis=1)
    count = len(confidences)
    samples = rng.integers(count, np.arange(draws)[:, None], np.arange(count), stream="lab bootstrap")
    errors = [calibration_error(confidences[sample], right[sample]) for sample in samples]
    uniform = rng.uniform(np.arange(draws)[:, None], np.arange(count), stream="lab luck")
    calibrated_errors = [calibration_error(confidences, sample < confidences) for sample in uniform]
    error = Estimate(calibration_error(confidences, right), float(np.std(errors, ddof=1)))
    return CalibrationMeasure(error, float(np.mean(calibrated_errors)), confidences - right)


def index_batches(model: AnyModel, count: int) -> Iterator[np.ndarray]:
    """Yield the indices of images in batches."""
    size = batch_for(model.config)
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))
