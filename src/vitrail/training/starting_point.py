"""What a run begins with: the initial model for the data, and its preprocessing."""

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

_LOOKED_AT = 200  # files that tell whether images are grey


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """What a run begins with: the initial model and its preprocessing."""

    model: AnyModel
    preprocess: Preprocess
    source: str = ""
    """Identifies the origin of the weights; a run can be resumed only with the same one."""
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Provenance of the weights for the bundle."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""
    probe: dict[str, Any] | None = None
    """Scores of its head, if that was fitted by least squares."""
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    """Images that could not be read."""
    body: Callable[[], AnyModel] | None = None
    """Builds the initial model again, except for its head, if the run may return to it."""
    rate_scale: float = 1.0
    """Factor of the recipe's learning rate."""
    learned: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """First values of parameters of the objective's own, by name, where they are not to be drawn at random."""


class RunContext(NamedTuple):
    """What the initial model is built from."""

    dataset: Dataset
    training: Split
    ranks: Ranks
    is_new: bool
    """Whether the run is new; a resumed run takes its weights from a checkpoint."""
    tell: Say
    """Prints a line for the user."""


def resolve_model(config: ModelConfig, dataset: Dataset, recipe: Recipe) -> ModelConfig:
    """The model for this data: channels, classes and, for small presets, the resolution come from DATA."""
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
    """Preprocessing for the data: small images without a crop, photos with a crop and ImageNet's statistics; the
    recipe's settings override it."""
    settings: dict[str, Any] = {"resolution": config.resolution}
    if split.in_memory is not None:
        settings["crop_fraction"] = 1.0
    if split.in_memory is not None or config.channels != 3:
        settings |= {"mean": (0.5,) * config.channels, "std": (0.5,) * config.channels}
    told = dict(recipe.preprocess)
    for name in ("mean", "std"):  # a recipe for colours on other images: one number for all channels
        if (
            isinstance(told.get(name), list | tuple)
            and len(told[name]) != config.channels
            and len(set(told[name])) == 1
        ):
            told[name] = (told[name][0],) * config.channels
    try:
        preprocess = Preprocess.from_json({**settings, **told})
    except UsageError as error:
        raise UsageError(f"{error} (in the recipe's preprocess)") from None
    for name, given, wanted in (
        ("resolution", preprocess.resolution, config.resolution),
        ("channels", preprocess.channels, config.channels),
    ):
        if given != wanted:
            raise UsageError(f"Preprocessing must give the model's {name} {wanted}, got {given}.")
    return preprocess


def sample_training_images(split: Split, preprocess: Preprocess, count: int, seed: int) -> torch.Tensor:
    """At most `count` random training images, preprocessed (B, C, H, W)."""
    chosen = rng.permutation(len(split), seed, stream="palette pictures")[:count]
    loader = Loader(split.select(np.sort(chosen)), preprocess, batch=64, shuffle=False, on_damage="substitute")
    return torch.cat([preprocess.scale(batch.pixels) for batch in loader.epoch()])


def count_channels(split: Split) -> int:
    """Channels of images in memory; of files, 1 if the first ones are all grey."""
    if (pixels := split.in_memory) is not None:
        return pixels.shape[3]
    modes = []
    for path in split.images[:_LOOKED_AT]:
        with contextlib.suppress(VitrailError):  # the loader will say more
            modes.append(identify(path)[1])
    return 1 if modes and all(mode in ("1", "L", "I", "F") or mode.startswith("I;16") for mode in modes) else 3
