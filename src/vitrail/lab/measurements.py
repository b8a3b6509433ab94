"""Cells that look at a trained model, or at the same model untrained, and what questions read of them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.bundles.bundle import load
from vitrail.lab.images import Images
from vitrail.lab.question import Accuracies
from vitrail.lab.results import Results
from vitrail.lab.training import read_config
from vitrail.lab.trial import Cell
from vitrail.models.base import AnyModel
from vitrail.models.create import build


def looking_cell(task: str, trained: Cell, passes: float, *, untrained: bool = False, **settings: Any) -> Cell:
    """A cell that looks at what another trained, which takes about so many forward `passes`; or at the model that it
    would begin with."""
    if untrained:
        settings = {**settings, "model": trained.settings["model"], "seed": trained.settings["seed"]}
    work = read_config(trained.settings).macs * passes
    return Cell(task, settings, () if untrained else (trained,), family=trained.family, work=work)


def open_model(settings: dict[str, Any], of: list[Path]) -> AnyModel:
    """The model that such a cell looks at."""
    if of:
        return load(of[0]).model
    torch.manual_seed(settings["seed"])
    return build(read_config(settings)).eval()


def read_test_images(images: Images, count: int) -> tuple[Tensor, np.ndarray]:
    """At most so many test images as models read them, and their classes."""
    some = images.test.spread(count)
    return images.preprocess.scale(torch.from_numpy(np.array(some.images))), some.labels


class Readings(Accuracies):
    """Numbers of each image, read from what cells found, in the place of right answers."""

    def __init__(
        self,
        results: Results,
        groups: dict[Any, list[Cell]],
        read: Callable[[dict[str, Any]], Any],
        alike: Callable[[Any], Any] = lambda _name: None,
    ) -> None:
        self._number = read
        super().__init__(results, groups, alike)

    def _read(self, results: Results, groups: dict[Any, list[Cell]]) -> dict[Any, np.ndarray]:
        found = {
            name: [one for cell in cells if (one := results.get(cell)) is not None] for name, cells in groups.items()
        }
        return {
            name: np.stack([np.asarray(self._number(one), np.float64) for one in some])
            for name, some in found.items()
            if some
        }

    @property
    def bounds(self) -> tuple[float, float]:
        return -math.inf, math.inf
