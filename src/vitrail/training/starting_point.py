"""The starting point of a run: the initial model for the data, and its preprocessing."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from vitrail.core import rng
from vitrail.core.errors import UsageError, VitrailError
from vitrail.core.terminal import Say
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import identify
from vitrail.data.loader import Loader
from vitrail.data.preprocess import Preprocess
from vitrail.models.base import AnyModel
from vitrail.models.config import ModelConfig
from vitrail.training.ranks import Ranks
from vitrail.training.recipe import OBJECTIVES, Recipe

_MAX_FILES_CHECKED = 200  # files that are opened to find out whether images are grey


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """Initial model of a run, its preprocessing and where both come from."""

    model: AnyModel
    preprocess: Preprocess
    source: str = ""
    """Identifies the origin of the weights; a run can be resumed only with the same one."""
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Provenance of the weights for the bundle."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    probe: dict[str, Any] | None = None
    """Leave-one-out scores of the head, if it was fitted by least squares."""
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    """Images that could not be read: the reason, by path."""
    body: Callable[[], AnyModel] | None = None
    """Rebuilds the initial model except for its head, for runs that may return to the starting point."""
    rate_scale: float = 1.0
    """Factor of the recipe's learning rate."""
    learned: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Initial values for parameters of the objective, by name; other parameters keep their random initialisation."""

    def with_licence(self, licence: str | None) -> "StartingPoint":
        """Return a copy whose provenance has this licence instead of the data's; unchanged if it is None."""
        return self if licence is None else dataclasses.replace(self, origin={**self.origin, "licence": licence})


class RunContext(NamedTuple):
    """Data, ranks and state of a run, from which its starting point is built."""

    dataset: Dataset
    training: Split
    ranks: Ranks
    is_new: bool
    """Whether the run is new; a resumed run takes its weights from a checkpoint."""
    tell: Say
    """Prints a line for the user."""


def resolve_model(config: ModelConfig, dataset: Dataset, recipe: Recipe) -> ModelConfig:
    """Return the model config for the data: channels, classes and, for small presets, the resolution come from DATA."""
    output, pixels = OBJECTIVES[recipe.objective].output, dataset.first_split.in_memory
    resolved = config.predicting(output).for_data(
        classes=0 if output == "features" else len(dataset.labels),
        channels=count_channels(dataset.first_split),
        resolution=None if pixels is None else pixels.shape[1:3],
        settings={name: value for name, value in recipe.model.items() if name not in ("classes", "channels")},
    )
    for name, fits in (("classes", resolved.classes), ("channels", resolved.channels)):
        if recipe.model.get(name, fits) != fits:
            raise UsageError(f"{name.capitalize()} must be DATA's {fits}, got model.{name} {recipe.model[name]!r}.")
    return resolved


def make_preprocess(config: ModelConfig, split: Split, recipe: Recipe) -> Preprocess:
    """Return the preprocessing for the data.

    Images in memory are not cropped; photos are cropped and normalised with the statistics of ImageNet. The settings of
    the recipe take precedence.
    """
    settings: dict[str, Any] = {"resolution": config.resolution}
    if split.in_memory is not None:
        settings["crop_fraction"] = 1.0
    if split.in_memory is not None or config.channels != 3:
        settings |= {"mean": (0.5,) * config.channels, "std": (0.5,) * config.channels}
    overrides = dict(recipe.preprocess)
    for name in ("mean", "std"):  # a recipe for colour images is used for other channels: repeat its single value
        values = overrides.get(name)
        if isinstance(values, list | tuple) and len(values) != config.channels and len(set(values)) == 1:
            overrides[name] = (values[0],) * config.channels
    try:
        preprocess = Preprocess.from_json({**settings, **overrides})
    except UsageError as error:
        raise UsageError(f"{error} (in the recipe's preprocess)") from None
    for name, value, required in (
        ("resolution", preprocess.resolution, config.resolution),
        ("channels", preprocess.channels, config.channels),
    ):
        if value != required:
            raise UsageError(f"Preprocessing must give the {name} of the model, {required}, got {value}.")
    return preprocess


def sample_training_images(split: Split, preprocess: Preprocess, count: int, seed: int) -> torch.Tensor:
    """Return at most `count` random training images, preprocessed (B, C, H, W)."""
    indices = rng.permutation(len(split), seed, stream="palette pictures")[:count]
    loader = Loader(split.select(np.sort(indices)), preprocess, batch=64, shuffle=False, on_damage="substitute")
    return torch.cat([preprocess.scale(batch.pixels) for batch in loader.epoch()])


def count_channels(split: Split) -> int:
    """Return the number of channels of the images of a split. Of files, 1 if the first ones are grey, otherwise 3."""
    if (pixels := split.in_memory) is not None:
        return pixels.shape[3]
    modes = []
    for path in split.images[:_MAX_FILES_CHECKED]:
        with contextlib.suppress(VitrailError):  # the loader reports unreadable files
            modes.append(identify(path)[1])
    return 1 if modes and all(mode in ("1", "L", "I", "F") or mode.startswith("I;16") for mode in modes) else 3
