"""Settings of augmentation; `data.augment.pipeline` applies them."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vitrail.core.errors import UsageError, VitrailError, did_you_mean
from vitrail.core.registry import Registry
from vitrail.data.augment.base import Augmentation

if TYPE_CHECKING:
    import numpy as np

    from vitrail.core.rng import Stream
    from vitrail.data.augment.mixing import Mixture

AUGMENTATIONS: Registry[type[Augmentation]] = Registry(
    "augmentation",
    {
        "crop": "vitrail.data.augment.crop:Crop",
        "flip": "vitrail.data.augment.flip:Flip",
        "randaugment": "vitrail.data.augment.randaugment:RandAugment",
        "jitter": "vitrail.data.augment.jitter:ColourJitter",
        "erasing": "vitrail.data.augment.erasing:Erasing",
        "mixing": "vitrail.data.augment.mixing:Mixing",
    },
    base="vitrail.data.augment.base:Augmentation",
)
"""Augmentations by name (see `data.augment.base`), in the order in which they are applied."""


@dataclasses.dataclass(frozen=True, init=False)
class Augment:
    """Settings of all augmentations in one table, such as `Augment(crop="pad", padding=1, mixup=0.2)`. The defaults
    change nothing.

    The settings of an augmentation NAME of another package are called `NAME` or `NAME_...`. Such a package is imported
    when one of these is set. A setting that several augmentations have, such as `fill`, is one setting of them all.
    """

    title: ClassVar[str] = "Augmentation"

    augmentations: tuple[Augmentation, ...]
    """All built-in ones and those of other packages that have a setting, in the order in which they are applied."""

    def __init__(self, **settings: Any) -> None:
        classes = [*_built_in(), *_added(name for name in settings if name not in Augment.names())]
        if unknown := [name for name in settings if name not in _names(classes)]:
            names = [*Augment.names(), *AUGMENTATIONS.extension_names]
            near = did_you_mean(unknown[0], names)
            raise UsageError(f"Setting of augmentation must be one of {', '.join(names)}, got {unknown[0]!r}.{near}")
        parts = (kind(**{name: settings[name] for name in _names([kind]) if name in settings}) for kind in classes)
        object.__setattr__(self, "augmentations", tuple(parts))

    def __getattr__(self, name: str) -> Any:
        for augmentation in self.__dict__.get("augmentations", ()):
            if name in _names([type(augmentation)]):
                return getattr(augmentation, name)
        raise AttributeError(f"{type(self).__name__} has no setting {name!r}")

    @staticmethod
    def names() -> list[str]:
        """Names of the settings of built-in augmentations."""
        return _names(_built_in())

    @staticmethod
    def has(name: str) -> bool:
        """Whether a setting is that of a built-in augmentation, or may be that of another package's."""
        return name in Augment.names() or any(_is_called(name, added) for added in AUGMENTATIONS.extension_names)

    @property
    def active(self) -> list[Augmentation]:
        """The augmentations that change anything."""
        return [augmentation for augmentation in self.augmentations if augmentation.is_active]

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return any(augmentation.mixes for augmentation in self.active)

    def mixture(self, stream: "Stream", size: tuple[int, int], alone: "np.ndarray | None" = None) -> "Mixture | None":
        """How the images of a batch are mixed in pairs: by the first augmentation that mixes."""
        mixing = next((augmentation for augmentation in self.active if augmentation.mixes), None)
        return None if mixing is None else mixing.mixture(stream, size, alone)

    def check_channels(self, channels: int) -> None:
        """Raise an error if an augmentation does not support images of this number of channels."""
        for augmentation in self.active:
            augmentation.check_channels(channels)

    def replace(self, **changes: Any) -> Self:
        """A copy with some settings changed and all checked."""
        return type(self)(**{**self.to_json(), **changes})

    def to_json(self) -> dict[str, Any]:
        """All settings, in JSON types."""
        values = {name: value for part in self.augmentations for name, value in part.to_json().items()}
        return {name: values[name] for name in _names(type(part) for part in self.augmentations)}

    @classmethod
    def from_json(cls, fields: object) -> Self:
        """The inverse of `to_json`. Missing settings take their defaults."""
        if not isinstance(fields, dict):
            raise UsageError(f"{cls.title} must be a JSON object, got {type(fields).__name__}.")
        return cls(**fields)

    def describe(self) -> list[dict[str, Any]]:
        """Name, value, default and meaning of each setting, as JSON; also of those that other packages add."""
        used = [type(augmentation) for augmentation in self.augmentations]
        others = [kind for name in AUGMENTATIONS.extension_names if (kind := AUGMENTATIONS[name]) not in used]
        parts = [*self.augmentations, *(kind() for kind in others)]
        rows = {row["setting"]: row for part in parts for row in part.describe()}
        return [rows[name] for name in _names(type(part) for part in parts)]


@functools.cache
def _built_in() -> list[type[Augmentation]]:
    return [AUGMENTATIONS[name] for name in AUGMENTATIONS.built_in_names]


def _added(settings: Iterable[str]) -> list[type[Augmentation]]:
    """The augmentations of other packages that have one of these settings."""
    settings = list(settings)
    classes = []
    for name in AUGMENTATIONS.extension_names:
        if any(_is_called(setting, name) for setting in settings):
            classes.append(AUGMENTATIONS[name])
            for setting in _names(classes[-1:]):
                if not _is_called(setting, name) and setting not in Augment.names():
                    raise VitrailError(
                        f"Settings of extension augmentation.{name} of {AUGMENTATIONS.provider(name)} must be called"
                        f" {name} or {name}_..., got {setting}. Rename the setting."
                    )
    return classes


def _is_called(setting: str, augmentation: str) -> bool:
    return setting == augmentation or setting.startswith(f"{augmentation}_")


def _names(classes: Iterable[type[Augmentation]]) -> list[str]:
    """The settings of several augmentations; those that they share come last."""
    count = Counter(itertools.chain.from_iterable(map(_fields, classes)))
    return sorted(count, key=lambda name: count[name] > 1)


@functools.cache
def _fields(kind: type[Augmentation]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]
