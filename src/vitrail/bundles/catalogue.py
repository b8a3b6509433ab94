"""The public checkpoints that vitrail can read, by names of ours. The table is catalogue.toml; nothing here needs torch
or a network."""

import dataclasses
import fnmatch
import functools
import tomllib
from importlib import resources
from typing import Any

from vitrail.core.errors import UsageError, did_you_mean
from vitrail.models import zoo
from vitrail.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A public checkpoint."""

    name: str
    """Our name for it, such as `vit-b16.augreg-in21k-1k`: the model, then the data it was trained on."""
    model: str
    """The model's name in `vitrail models`."""
    pixels: int
    classes: int
    """0 if it has no head."""
    hub: str
    """Repository of the Hugging Face Hub."""
    licence: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Where it differs from the model of that name."""
    original: str | None = None
    """Address of the file that its authors published."""
    accuracy: float | None = None
    """Published accuracy on ImageNet's validation images, in per cent."""
    linear: float | None = None
    """The same for a linear classifier on the frozen features."""
    source: str | None = None
    """Who published these numbers."""

    @property
    def address(self) -> str:
        """What `vitrail convert` fetches for this name."""
        return f"hf:{self.hub}"

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return zoo.find(self.model).replace(resolution=self.pixels, classes=self.classes, **self.settings)

    @property
    def class_names(self) -> list[str] | None:
        """ImageNet's 1,000 names, in the order that all of these checkpoints have; None for other classes."""
        if self.classes != 1000:
            return None
        return _read("imagenet-1k.txt").splitlines()

    def to_json(self) -> dict[str, Any]:
        """A row of `vitrail weights --json`."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "settings"}
        return row | {"hub": self.address, "parameters": self.config.parameters}


@functools.cache
def catalogue() -> dict[str, Published]:
    """All public checkpoints by name."""
    return {name: Published(name=name, **row) for name, row in tomllib.loads(_read("catalogue.toml")).items()}


def _read(name: str) -> str:
    return resources.files("vitrail.bundles").joinpath(name).read_text(encoding="utf-8")


def list_published(pattern: str = "*") -> list[Published]:
    """Public checkpoints whose name, model or repository matches a pattern with `*` and `?`, in upper or lower case. A
    pattern that matches nothing may be how these begin: `dino` is `dino*`."""
    for wanted in (pattern, f"{pattern}*"):
        matching = [
            published
            for published in catalogue().values()
            if any(
                fnmatch.fnmatchcase(text.lower(), wanted.lower())
                for text in (published.name, published.model, published.hub)
            )
        ]
        if pattern and matching:
            return matching
    raise UsageError(
        f"Pattern must match a name that `vitrail weights` lists, got {pattern!r}.{suggest_published(pattern)}"
    )


def suggest_published(name: str) -> str:
    """`" Did you mean 'vit-b16.in21k'?"`: a checkpoint of a similar name, also for names of timm and of the Hub."""
    theirs = {alias: one.name for one in catalogue().values() for alias in (one.hub, one.hub.partition("/")[2])}
    return did_you_mean(name, catalogue(), theirs)
