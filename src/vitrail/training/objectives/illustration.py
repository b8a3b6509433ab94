"""Illustrations of an objective for a few images, as arrays for observers."""

import contextlib
from typing import NamedTuple

import numpy as np
import torch

from vitrail.core.errors import CorruptFileError
from vitrail.data.dataset import Split
from vitrail.data.preprocess import Preprocess
from vitrail.training.objectives.base import Objective


class IllustrationArrays(NamedTuple):
    """An `Illustration` whose images are converted to pixels."""

    title: str
    rows: tuple[tuple[str, np.ndarray], ...]
    """A caption and 8-bit images (B, H, W, C) for each row."""


@torch.inference_mode()
def illustrate(objective: Objective, preprocess: Preprocess, split: Split) -> IllustrationArrays | None:
    """Return the illustration of an objective for evenly spaced images of a split.

    Unreadable images are skipped. Return None if no image is left or the objective has no illustration.
    """
    crops = []
    for index in range(0, len(split), max(len(split) // max(objective.illustrated, 1), 1))[: objective.illustrated]:
        with contextlib.suppress(CorruptFileError):
            crops.append(preprocess.crop(split.images[index]))
    if not crops:
        return None
    device = next(objective.parameters()).device
    objective.eval()
    title, rows = objective.illustrate(preprocess.scale(torch.from_numpy(np.stack(crops))).to(device))
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (preprocess.mean, preprocess.std))
    return IllustrationArrays(
        title,
        tuple(
            (
                caption,
                ((images_BCHW * std + mean).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1).cpu().numpy(),
            )
            for caption, images_BCHW in rows
        ),
    )
