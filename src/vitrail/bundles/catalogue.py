"""The catalogue of public checkpoints that vitrail can read (catalogue.toml). Needs neither torch nor a network."""

import dataclasses
import fnmatch
import functools
import tomllib
from importlib import resources
from typing import Any

from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.natural_order import natural_key
from vitrail.models import zoo
from vitrail.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A public checkpoint."""

    name: str
    """Name of the checkpoint in vitrail, such as `vit-b16.augreg-in21k-1k`: the model, then its training data."""
    model: str
    """The model's name in `vitrail models`."""
    pixels: int
    classes: int
    """Number of classes; 0 for a checkpoint without a head."""
    hub: str
    """Repository of the Hugging Face Hub."""
    licence: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that differ from those of `model`."""
    original: str | None = None
    """Address of the file that the authors published."""
    accuracy: float | None = None
    """Published accuracy on ImageNet's validation images, in per cent."""
    linear: float | None = None
    """Published accuracy of a linear classifier on the frozen features, in per cent."""
    source: str | None = None
    """Publisher of `accuracy` and `linear`."""

    @property
    def collection(self) -> str:
        """First part of the name, such as `vit` or `dinov2`."""
        return self.name.partition("-")[0]

    @property
    def address(self) -> str:
        """The address that `vitrail convert` fetches for this name."""
        return f"hf:{self.hub}"

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return zoo.find(self.model).replace(resolution=self.pixels, classes=self.classes, **self.settings)

    @property
    def class_names(self) -> list[str] | None:
        """ImageNet's 1,000 class names, in the order that all of these checkpoints use. None for other classes."""
        if self.classes != 1000:
            return None
        return _read_resource("imagenet-1k.txt").splitlines()

    def to_json(self) -> dict[str, Any]:
        """Return the row of this checkpoint in `vitrail weights --json`."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "settings"}
        return row | {"hub": self.address, "parameters": self.config.parameters}


@functools.cache
def catalogue() -> dict[str, Published]:
    """Return all public checkpoints by name."""
    return {name: Published(name=name, **row) for name, row in tomllib.loads(_read_resource("catalogue.toml")).items()}


def _read_resource(name: str) -> str:
    return resources.files("vitrail.bundles").joinpath(name).read_text(encoding="utf-8")


def list_published(pattern: str = "*") -> list[Published]:
    """Return public checkpoints whose name, model or repository matches a pattern with `*` and `?`, ignoring case.

    A pattern that matches nothing is tried as a prefix: `dino` is `dino*`. Raise UsageError if that matches nothing.
    Collections are in the order of the catalogue, their checkpoints in the order of `vitrail models`, then by name.
    """
    collections = list(dict.fromkeys(published.collection for published in catalogue().values()))
    models = list(zoo.MODELS)

    def order(published: Published) -> tuple[Any, ...]:
        places = collections.index(published.collection), models.index(published.model)
        return *places, natural_key(published.name)

    for candidate in (pattern, f"{pattern}*"):
        matching = [
            published
            for published in catalogue().values()
            if any(
                fnmatch.fnmatchcase(text.lower(), candidate.lower())
                for text in (published.name, published.model, published.hub)
            )
        ]
        if pattern and matching:
            return sorted(matching, key=order)
    raise UsageError(
        f"Pattern must match a name that `vitrail weights` lists, got {pattern!r}.{suggest_published(pattern)}"
    )


def suggest_published(name: str) -> str:
    """Suggest a checkpoint with a similar name, also for names of timm and of the Hub:
    `" Did you mean 'vit-b16.in21k'?"`."""
    aliases = {
        alias: published.name
        for published in catalogue().values()
        for alias in (published.hub, published.hub.partition("/")[2])
    }
    return did_you_mean(name, catalogue(), aliases)
