"""Settings of all augmentations of training images; `data.augment.pipeline` applies them."""

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
    """Settings of all augmentations, such as `Augment(crop="pad", padding=1, mixup=0.2)`. The defaults change nothing.

    The settings of an augmentation NAME of another package are called `NAME` or `NAME_...`. The package is imported
    when such a setting is set. A setting that several augmentations have, such as `fill`, has the same value for all.
    """

    title: ClassVar[str] = "Augmentation"

    augmentations: tuple[Augmentation, ...]
    """All built-in augmentations, and those of other packages with a setting, in the order of application."""

    def __init__(self, **settings: Any) -> None:
        classes = [*_built_in_classes(), *_extension_classes(name for name in settings if name not in Augment.names())]
        if unknown := [name for name in settings if name not in _setting_names(classes)]:
            names = [*Augment.names(), *AUGMENTATIONS.extension_names]
            suggestion = did_you_mean(unknown[0], names)
            raise UsageError(
                f"Setting of augmentation must be one of {', '.join(names)}, got {unknown[0]!r}.{suggestion}"
            )
        augmentations = tuple(
            augmentation(**{name: settings[name] for name in _setting_names([augmentation]) if name in settings})
            for augmentation in classes
        )
        object.__setattr__(self, "augmentations", augmentations)

    def __getattr__(self, name: str) -> Any:
        for augmentation in self.__dict__.get("augmentations", ()):
            if name in _setting_names([type(augmentation)]):
                return getattr(augmentation, name)
        raise AttributeError(f"{type(self).__name__} has no setting {name!r}")

    @staticmethod
    def names() -> list[str]:
        """Return the names of the settings of built-in augmentations."""
        return _setting_names(_built_in_classes())

    @staticmethod
    def has(name: str) -> bool:
        """Return whether a setting belongs to a built-in augmentation, or by its name to one of another package."""
        return name in Augment.names() or any(
            _belongs_to(name, extension) for extension in AUGMENTATIONS.extension_names
        )

    @property
    def active(self) -> list[Augmentation]:
        """The augmentations whose settings change images."""
        return [augmentation for augmentation in self.augmentations if augmentation.is_active]

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return any(augmentation.mixes for augmentation in self.active)

    def mixture(self, stream: "Stream", size: tuple[int, int], alone: "np.ndarray | None" = None) -> "Mixture | None":
        """Return how to mix the images of a batch in pairs, by the first augmentation that mixes; None without one."""
        mixing = next((augmentation for augmentation in self.active if augmentation.mixes), None)
        return None if mixing is None else mixing.mixture(stream, size, alone)

    def check_channels(self, channels: int) -> None:
        """Raise UsageError if an active augmentation does not support images of this number of channels."""
        for augmentation in self.active:
            augmentation.check_channels(channels)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed settings. All settings are checked."""
        return type(self)(**{**self.to_json(), **changes})

    def to_json(self) -> dict[str, Any]:
        """Return all settings in JSON types."""
        values = {name: value for augmentation in self.augmentations for name, value in augmentation.to_json().items()}
        return {
            name: values[name] for name in _setting_names(type(augmentation) for augmentation in self.augmentations)
        }

    @classmethod
    def from_json(cls, fields: object) -> Self:
        """Create settings from the output of `to_json`. Missing settings take their defaults."""
        if not isinstance(fields, dict):
            raise UsageError(f"{cls.title} must be a JSON object, got {type(fields).__name__}.")
        return cls(**fields)

    def describe(self) -> list[dict[str, Any]]:
        """Return the name, value, default and description of each setting in JSON types.

        Settings of augmentations that other packages add are included.
        """
        extensions = [AUGMENTATIONS[name] for name in AUGMENTATIONS.extension_names]
        unused = [extension() for extension in extensions if extension not in map(type, self.augmentations)]
        augmentations = [*self.augmentations, *unused]
        rows = {row["setting"]: row for augmentation in augmentations for row in augmentation.describe()}
        return [rows[name] for name in _setting_names(type(augmentation) for augmentation in augmentations)]


@functools.cache
def _built_in_classes() -> list[type[Augmentation]]:
    return [AUGMENTATIONS[name] for name in AUGMENTATIONS.built_in_names]


def _extension_classes(settings: Iterable[str]) -> list[type[Augmentation]]:
    """Return the augmentations of other packages to which any of these settings belongs, by its name."""
    settings = list(settings)
    classes = []
    for name in AUGMENTATIONS.extension_names:
        if any(_belongs_to(setting, name) for setting in settings):
            classes.append(AUGMENTATIONS[name])
            for setting in _setting_names(classes[-1:]):
                if not _belongs_to(setting, name) and setting not in Augment.names():
                    raise VitrailError(
                        f"Settings of extension augmentation.{name} of {AUGMENTATIONS.provider(name)} must be called"
                        f" {name} or {name}_..., got {setting}. Rename the setting."
                    )
    return classes


def _belongs_to(setting: str, augmentation: str) -> bool:
    """Return whether the name of a setting is that of an augmentation, or begins with it and an underscore."""
    return setting == augmentation or setting.startswith(f"{augmentation}_")


def _setting_names(classes: Iterable[type[Augmentation]]) -> list[str]:
    """Return the names of the settings of augmentations; settings that several of them share come last."""
    count = Counter(itertools.chain.from_iterable(map(_field_names, classes)))
    return sorted(count, key=lambda name: count[name] > 1)


@functools.cache
def _field_names(augmentation: type[Augmentation]) -> list[str]:
    return [field.name for field in dataclasses.fields(augmentation)]
