"""Registries of plugins by name: built-in plugins and those of installed packages.

A package adds a plugin through an entry point of the group `vitrail.extensions` called `CATEGORY.NAME`: `family.swin`,
`position.spiral`, `format.flax`, `remote.s3`, `panel.saliency`, `objective.triplet`, `question.texture`,
`augmentation.blur`, `source.lmdb`. Names are read from the packages' metadata, which imports nothing. A plugin is
imported when it is first used.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from vitrail.core.errors import UsageError, VitrailError, did_you_mean, first_line

GROUP = "vitrail.extensions"

Plugin = TypeVar("Plugin")


class Registry(Generic[Plugin]):
    """The plugins of one category, by name.

    Args:
        category: The first part of the names of entry points, such as `family`.
        built_ins: `module:attribute` of each built-in plugin. A built-in name takes precedence over an extension's.
        base: `module:attribute` of the class that an extension must subclass.
        name_attribute: Attribute of an extension that must equal its name.
    """

    def __init__(
        self,
        category: str,
        built_ins: Mapping[str, str],
        *,
        base: str | None = None,
        name_attribute: str | None = None,
    ) -> None:
        self.category = category
        self._built_ins = dict(built_ins)
        self._base = base
        self._name_attribute = name_attribute

    def __iter__(self) -> Iterator[str]:
        yield from self._built_ins
        yield from (name for name in _extensions(self.category) if name not in self._built_ins)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._built_ins or name in _extensions(self.category))

    def __getitem__(self, name: str) -> Plugin:
        """Import and return the plugin of a name. No other plugin is imported."""
        if isinstance(name, str) and name in self._built_ins:
            return cast(Plugin, load_object(self._built_ins[name]))
        self.check(name)
        entry_point, *duplicates = _extensions(self.category)[name]
        if duplicates:
            raise VitrailError(
                f"Extension {self.category}.{name} must come from one package, got {self.provider(name)}."
                " Uninstall all but one."
            )
        try:
            plugin = entry_point.load()
        except Exception as error:  # another package can raise any error when it is imported
            raise VitrailError(
                f"Extension {self.category}.{name} of {self.provider(name)} cannot be used ({first_line(error)})."
            ) from None
        self._check_extension(name, plugin)
        return plugin

    def check(self, name: object) -> None:
        """Raise UsageError if the name is unknown. Nothing is imported."""
        if name not in self:
            near = did_you_mean(str(name), self)
            raise UsageError(f"{self.category.capitalize()} must be one of {', '.join(self)}, got {name!r}.{near}")

    def _check_extension(self, name: str, plugin: Any) -> None:
        """Raise VitrailError if the plugin has the wrong base class or states another name."""
        subject = f"Extension {self.category}.{name} of {self.provider(name)}"
        if self._base is not None:
            base = load_object(self._base)
            if not isinstance(plugin, type) or not issubclass(plugin, base):
                raise VitrailError(f"{subject} must be a subclass of {base.__name__}, got {plugin!r}.")
        attribute = self._name_attribute
        if attribute is not None and (own_name := getattr(plugin, attribute, None)) != name:
            raise VitrailError(f"{subject} must have {attribute} = {name!r}, got {own_name!r}. Rename one of the two.")

    @property
    def built_in_names(self) -> list[str]:
        """The names of built-in plugins, in their order."""
        return list(self._built_ins)

    @property
    def extension_names(self) -> list[str]:
        """The names that other packages add."""
        return [name for name in self if name not in self._built_ins]

    def provider(self, name: str) -> str | None:
        """Return name and version of the package (or packages) that adds a plugin; None for built-ins."""
        if name in self._built_ins or name not in self:
            return None
        packages = [entry_point.dist for entry_point in _extensions(self.category)[name]]
        return " and ".join(
            f"{package.name} {package.version}" if package else "a package without metadata" for package in packages
        )


def load_object(path: str) -> Any:
    """Import the object at `module:attribute`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _extensions(category: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a category, by name. A name has several if several packages use it."""
    extensions: dict[str, list[EntryPoint]] = {}
    for entry_point in _entry_points():
        own_category, _, name = entry_point.name.partition(".")
        if own_category == category and name:
            extensions.setdefault(name, []).append(entry_point)
    return extensions


@functools.cache
def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry_point: entry_point.name))
