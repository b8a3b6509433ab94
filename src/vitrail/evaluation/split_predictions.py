"""Predictions of a model for all images of a split, each image exactly once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.decision import SINGLE_LABEL
from vitrail.data.loader import Loader
from vitrail.models.base import AnyModel
from vitrail.models.device import evaluating


class SplitPredictions(NamedTuple):
    """Probabilities (n, classes) of the images with these indices (n), and their true classes or labels."""

    indices: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray

    @staticmethod
    def join(rank_predictions: "list[SplitPredictions]") -> "SplitPredictions":
        """Join the predictions of all ranks, in the order of the images."""
        arrays = [np.concatenate(rank_arrays) for rank_arrays in zip(*rank_predictions, strict=True)]
        order = np.argsort(arrays[0], kind="stable")
        return SplitPredictions(*(array[order] for array in arrays))


Forward = Callable[[Tensor], Tensor]
"""A function from cropped images, uint8 (B, H, W, C), to logits (B, K)."""


@torch.inference_mode()
def predict_split(
    model: AnyModel,
    loader: Loader,
    probabilities: Callable[[Tensor], Tensor] = SINGLE_LABEL.probabilities,
    *,
    meter: Callable[[int], None] | None = None,
) -> SplitPredictions:
    """Return the model's predictions for the loader's images, or for the part of them that this rank computes.

    Corrupt images are left out. `probabilities` converts logits. `meter` is called with the number of processed images.
    """
    weight = next(model.parameters())

    def forward(pixels_BHWC: Tensor) -> Tensor:
        return model(loader.preprocess.scale(pixels_BHWC.to(weight.device)).to(weight.dtype))

    with evaluating(model):
        return collect_predictions(forward, loader, model.config.classes, probabilities, meter=meter)


def collect_predictions(
    forward: Forward,
    loader: Loader,
    classes: int,
    probabilities: Callable[[Tensor], Tensor],
    *,
    meter: Callable[[int], None] | None = None,
) -> SplitPredictions:
    """Return predictions for the loader's images like `predict_split`, with any function that computes logits."""
    batches: list[tuple[Any, ...]] = []
    count = 0
    for batch in loader.epoch():
        count += len(batch.labels)
        if meter is not None:
            meter(count)
        if not len(batch.labels):
            continue
        batch_probabilities = probabilities(forward(batch.pixels).float()).cpu().numpy()
        is_readable = batch.weights.numpy() > 0
        batches.append(
            (batch.indices[is_readable], batch.labels.numpy()[is_readable], batch_probabilities[is_readable])
        )
    if not batches:
        labels = loader.split.labels[:0]
        return SplitPredictions(np.zeros(0, np.int64), labels, np.zeros((0, classes), np.float32))
    return SplitPredictions(*(np.concatenate(arrays) for arrays in zip(*batches, strict=True)))
