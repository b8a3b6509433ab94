"""Trials that measure a trained or an untrained model, and the values that questions read from them."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.bundle import load
from vitrail.lab.images import Images
from vitrail.lab.question import Accuracies
from vitrail.lab.training import read_config
from vitrail.lab.trial import Trial
from vitrail.lab.trial_results import Results
from vitrail.models.base import AnyModel
from vitrail.models.create import build


def measurement_trial(task: str, trained: Trial, passes: float, *, untrained: bool = False, **settings: Any) -> Trial:
    """Return a trial that measures the model of a training trial, or, if `untrained`, its initial model.

    `passes` is the approximate cost in forward passes of one image.
    """
    if untrained:
        settings = {**settings, "model": trained.settings["model"], "seed": trained.settings["seed"]}
    work = read_config(trained.settings).macs * passes
    return Trial(task, settings, () if untrained else (trained,), family=trained.family, work=work)


def open_model(settings: dict[str, Any], bundles: list[Path]) -> AnyModel:
    """Return the model that a measurement trial measures: that of the bundle or, without bundle, an untrained model."""
    if bundles:
        return load(bundles[0]).model
    torch.manual_seed(settings["seed"])
    return build(read_config(settings)).eval()


def read_test_images(images: Images, count: int) -> tuple[Tensor, np.ndarray]:
    """Return at most `count` test images, scaled for the model, and their labels."""
    split = images.test.sample_evenly(count)
    return images.preprocess.scale(torch.from_numpy(np.array(split.images))), split.labels


class MeasuredValues(Accuracies):
    """`Accuracies` for any number per image. `read` returns the numbers (images) from the result of a trial."""

    def __init__(
        self, results: Results, groups: Mapping[Any, Sequence[Trial]], read: Callable[[dict[str, Any]], Any]
    ) -> None:
        self._read_numbers = read
        super().__init__(results, groups)

    def _read(self, result: dict[str, Any]) -> np.ndarray:
        return np.asarray(self._read_numbers(result), np.float64)

    @property
    def bounds(self) -> tuple[float, float]:
        return -math.inf, math.inf
