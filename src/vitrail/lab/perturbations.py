"""Changed images, and a model's answers to them: shifts, shuffled blocks, dropped cells, filters.

Every measure gives a number for each image, and the mean of these is the measure: its interval follows from their
spread, and two models are compared on the same images. Shapes: B images of a batch, C channels, H x W pixels.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.analysis.evidence import fill
from vitrail.core import rng
from vitrail.core.settings import Pair
from vitrail.evaluation.metrics import calibration_error
from vitrail.inference.engine import batch_for
from vitrail.lab.statistics import Estimate
from vitrail.lab.trial import pack, unpack
from vitrail.models.activations import evaluating
from vitrail.models.base import AnyModel

Perturbation = Callable[[Tensor, np.ndarray], Tensor]
"""What is done to images (B, C, H, W), given their numbers (B): what is random depends on those alone."""

DROP_SHARES = (0.25, 0.5, 0.75)
"""Of cells that are dropped."""
BANDS = (0.125, 0.25, 0.5)
"""Where filters cut, as shares of the highest frequency."""
_DRAWS = 2  # shifts of each image at each distance


# Changes


def shift(images: Tensor, down: np.ndarray, right: np.ndarray) -> Tensor:
    """Move each image by so many pixels (B); what comes in over the rim is mirrored there."""
    sides = [_mirrored_indices(size, pixels) for size, pixels in zip(images.shape[2:], (down, right), strict=True)]
    rows, columns = (torch.from_numpy(side).to(images.device) for side in sides)
    each = torch.arange(len(images), device=images.device)[:, None, None]
    return images[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _mirrored_indices(size: int, pixels: np.ndarray) -> np.ndarray:
    """Where the pixels of a side come from (B, size)."""
    places = np.abs(np.arange(size) - pixels[:, None])
    return np.where(places > size - 1, 2 * (size - 1) - places, places)


def shift_distances(side: int) -> tuple[int, ...]:
    """Distances in pixels: one to four parts of 28 of the side, which is 1 to 4 px of a small image."""
    return tuple(sorted({max(round(part * side / 28), 1) for part in (1, 2, 3, 4)}))


def ring_shift(distance: int, draw: int = 0) -> Perturbation:
    """Each image moved by `distance` in one direction at least and no more in the other, at random."""

    def perturb(images: Tensor, numbers: np.ndarray) -> Tensor:
        place = rng.integers(8 * distance, distance, draw, numbers, stream="lab shift")
        side, along = np.divmod(place, 2 * distance)
        far, near = np.full_like(along, distance), along - distance
        down = np.select([side == 0, side == 1, side == 2], [-far, near, far], -near)
        right = np.select([side == 0, side == 1, side == 2], [near, far, -near], -far)
        return shift(images, down, right)

    return perturb


def shuffle(grid: Pair) -> Perturbation:
    """The blocks of a grid in a random order, each image in another."""

    def perturb(images: Tensor, numbers: np.ndarray) -> Tensor:
        blocks = grid[0] * grid[1]
        keys = rng.bits(blocks, numbers[:, None], np.arange(blocks), stream="lab shuffle")
        order = torch.from_numpy(np.argsort(keys, axis=1)).to(images.device)
        batch, channels, height, width = images.shape
        tall, wide = height // grid[0], width // grid[1]
        block_pixels = (
            images.view(batch, channels, grid[0], tall, grid[1], wide).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
        )
        moved = block_pixels[torch.arange(batch, device=images.device)[:, None], order]
        return moved.unflatten(1, grid).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)

    return perturb


def shuffle_grids(*resolutions: Pair) -> list[Pair]:
    """Grids of blocks that divide images of all these sizes: from 2 x 2 on, each of about twice as many a side."""
    grids: list[Pair] = []
    for side in range(2, min(min(sizes) for sizes in resolutions) + 1):
        fits = all(height % side == 0 and width % side == 0 for height, width in resolutions)
        if fits and side <= 16 and (not grids or side >= 1.7 * grids[-1][0]):
            grids.append((side, side))
    return grids


def drop(share: float, grid: Pair) -> Perturbation:
    """A random share of the cells of a grid filled with the image's mean colour, in each image others."""

    def perturb(images: Tensor, numbers: np.ndarray) -> Tensor:
        count = grid[0] * grid[1]
        keys = rng.bits(count, numbers[:, None], np.arange(count), stream="lab drop")
        is_dropped = np.argsort(np.argsort(keys, axis=1), axis=1) < round(share * count)
        return fill(images, torch.from_numpy(is_dropped).to(images.device), grid)

    return perturb


def low_pass(band: float) -> Perturbation:
    """Only frequencies up to `band`, as a share of the highest that the shorter side has."""
    return lambda images, _numbers: _filtered(images, lambda frequency: frequency <= band)


def high_pass(band: float) -> Perturbation:
    """Only frequencies above `band`, and the mean colour."""
    return lambda images, _numbers: _filtered(images, lambda frequency: (frequency > band) | (frequency == 0))


def _filtered(images: Tensor, keeps: Callable[[Tensor], Tensor]) -> Tensor:
    height, width = images.shape[2:]
    rows, columns = torch.fft.fftfreq(height), torch.fft.rfftfreq(width)
    frequency = torch.hypot(rows[:, None], columns) * 2  # 1 is one cycle in two pixels
    mask = keeps(frequency).to(images.device, images.dtype)
    return torch.fft.irfft2(torch.fft.rfft2(images) * mask, s=(height, width))


# Answers


class PerturbedPredictions(NamedTuple):
    """A model's answers to changed images, one for each image."""

    right: np.ndarray
    """Whether it names the image rightly."""
    same: np.ndarray
    """Whether it says what it says of the image unchanged."""

    def to_json(self) -> dict[str, str]:
        """As text."""
        return {"right": pack(self.right), "same": pack(self.same)}

    @classmethod
    def from_json(cls, fields: Mapping[str, str], count: int) -> "PerturbedPredictions":
        """The inverse of `to_json`."""
        return cls(*(unpack(fields[name], count).astype(bool) for name in cls._fields))


@torch.inference_mode()
def predict_probabilities(model: AnyModel, images: Tensor, perturbation: Perturbation | None = None) -> np.ndarray:
    """What the model says of images (n, classes)."""
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
    """The answers to every change; `plain` are those to the images as they are (n)."""
    for name, perturbation in perturbations.items():
        predicted = predict_probabilities(model, images, perturbation).argmax(axis=1)
        yield name, PerturbedPredictions(predicted == labels, predicted == plain)


def shift_perturbations(distances: Iterable[int]) -> dict[str, Perturbation]:
    """Every distance, several draws of each: `shift 2 1` is the second draw of two pixels."""
    return {f"shift {far} {draw}": ring_shift(far, draw) for far in distances for draw in range(_DRAWS)}


def other_perturbations(grids: Sequence[Pair], drop_grid: Pair) -> dict[str, Perturbation]:
    """Shuffled blocks, dropped cells, filters."""
    return {
        **{f"shuffle {grid[0]}": shuffle(grid) for grid in grids},
        **{f"drop {share:g}": drop(share, drop_grid) for share in DROP_SHARES},
        **{f"low {band:g}": low_pass(band) for band in BANDS},
        **{f"high {band:g}": high_pass(band) for band in BANDS},
    }


CURVES = ("shuffle", "drop", "low", "high")
"""Kinds of `other_changes`; each is drawn as a curve."""


def curve_points(kind: str, names: Iterable[str]) -> list[tuple[float, str]]:
    """The changes of a kind as points of a curve: blocks a side, or per cent of cells or frequencies. The image as it
    is, which has no name, stands where it belongs."""
    scale, unchanged = {"shuffle": (1, 1), "drop": (100, 0), "low": (100, 100), "high": (100, 0)}[kind]
    points = [(scale * float(name.partition(" ")[2]), name) for name in names if name.startswith(f"{kind} ")]
    return sorted([*points, (float(unchanged), "")])


def shift_values(
    predictions: Mapping[str, PerturbedPredictions], right: np.ndarray, far: int | None = None
) -> dict[str, np.ndarray]:
    """For each image the mean over shifts (of one distance, or of all): whether it is named rightly, and, among those
    that are right where they stand, whether the answer stays."""
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
    """A number for each image; their mean is sum(parts) / sum(of), and their spread that of the ratio (linearised)."""
    if not totals.sum():
        return np.zeros(len(totals))
    share = parts.sum() / totals.sum()
    return share + (parts - share * totals) / totals.mean()


def mean_of(values: np.ndarray) -> Estimate:
    """The mean over images, with its error."""
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))), len(values) - 1)


class CalibrationMeasure(NamedTuple):
    """Whether a model is as sure as it is right."""

    error: Estimate
    """Expected calibration error over 15 bins; its error by the bootstrap over images."""
    by_chance: float
    """What a perfectly calibrated model as sure as this one would have on so many images."""
    over: np.ndarray
    """For each image confidence less 1 if right: the mean is how far the model is too sure."""


def measure_calibration(probabilities: np.ndarray, right: np.ndarray, draws: int = 200) -> CalibrationMeasure:
    """From the probabilities (n, classes) that a model gives, and whether each answer was right (n)."""
    confidences = probabilities.max(axis=1)
    count = len(confidences)
    samples = rng.integers(count, np.arange(draws)[:, None], np.arange(count), stream="lab bootstrap")
    errors = [calibration_error(confidences[sample], right[sample]) for sample in samples]
    luck = rng.uniform(np.arange(draws)[:, None], np.arange(count), stream="lab luck")
    ideal = [calibration_error(confidences, sample < confidences) for sample in luck]
    error = Estimate(calibration_error(confidences, right), float(np.std(errors, ddof=1)))
    return CalibrationMeasure(error, float(np.mean(ideal)), confidences - right)


def index_batches(model: AnyModel, count: int) -> Iterator[np.ndarray]:
    """Numbers of images, a batch at a time."""
    size = batch_for(model.config)
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))
