"""A model's predictions for all images of a split, each exactly once."""

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
    """Probabilities (n, classes) for the images with these indices, and the true classes or labels."""

    indices: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray

    @staticmethod
    def join(parts_of_all: "list[SplitPredictions]") -> "SplitPredictions":
        """The predictions of all ranks, in the order of the images."""
        everything = [np.concatenate(parts) for parts in zip(*parts_of_all, strict=True)]
        order = np.argsort(everything[0], kind="stable")
        return SplitPredictions(*(part[order] for part in everything))


Forward = Callable[[Tensor], Tensor]
"""From cropped images, uint8 (B, H, W, C), to logits."""


@torch.inference_mode()
def predict_split(
    model: AnyModel,
    loader: Loader,
    probabilities: Callable[[Tensor], Tensor] = SINGLE_LABEL.probabilities,
    *,
    meter: Callable[[int], None] | None = None,
) -> SplitPredictions:
    """The model's predictions for this rank's part of the loader's images; damaged ones are left out. `probabilities`
    makes them of logits; `meter` is told how many images are done."""
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
    """`answer` for whatever makes logits of cropped images."""
    found: list[tuple[Any, ...]] = []
    done = 0
    for batch in loader.epoch():
        done += len(batch.labels)
        if meter is not None:
            meter(done)
        if not len(batch.labels):
            continue
        given = probabilities(forward(batch.pixels).float()).cpu().numpy()
        is_good = batch.weights.numpy() > 0
        found.append((batch.indices[is_good], batch.labels.numpy()[is_good], given[is_good]))
    if not found:
        labels = loader.split.labels[:0]
        return SplitPredictions(np.zeros(0, np.int64), labels, np.zeros((0, classes), np.float32))
    return SplitPredictions(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
