"""Registries of kinds by name: built-in ones and those of installed packages.

A package adds a kind through an entry point of the group `vitrail.extensions` called `KIND.NAME`: `family.swin`,
`position.spiral`, `format.flax`, `panel.saliency`, `objective.triplet`. Names are read from the packages' metadata,
which imports nothing; the code of a kind is imported when it is first used.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from vitrail.errors import UsageError, VitrailError, did_you_mean

GROUP = "vitrail.extensions"

Kind = TypeVar("Kind")


class Registry(Generic[Kind]):
    """All kinds of one sort, by name. `own` maps the built-in names to `module:attribute`; they take precedence over
    extensions."""

    def __init__(self, sort: str, own: Mapping[str, str]) -> None:
        self.sort, self._own = sort, dict(own)

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in _added(self.sort) if name not in self._own)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._own or name in _added(self.sort))

    def __getitem__(self, name: str) -> Kind:
        """The object registered under a name. Only this one is imported."""
        self.check(name)
        if name in self._own:
            return cast(Kind, load_object(self._own[name]))
        try:
            return _added(self.sort)[name].load()
        except Exception as error:  # whatever a stranger's module raises when it is imported
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise VitrailError(
                f"Extension {self.sort}.{name} of {self.provider(name)} cannot be used ({reason})."
            ) from None

    def check(self, name: object) -> None:
        """Refuse an unknown name. Nothing is imported."""
        if name not in self:
            near = did_you_mean(str(name), self)
            raise UsageError(f"{self.sort.capitalize()} must be one of {', '.join(self)}, got {name!r}.{near}")

    @property
    def added(self) -> list[str]:
        """The names that other packages add."""
        return [name for name in self if name not in self._own]

    def provider(self, name: str) -> str | None:
        """The package that adds a name, with its version; None for built-in names."""
        if name in self._own or name not in self:
            return None
        package = _added(self.sort)[name].dist
        return f"{package.name} {package.version}" if package is not None else "a package without metadata"


def load_object(path: str) -> Any:
    """The object at `module:attribute`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _added(sort: str) -> dict[str, EntryPoint]:
    found = ((point.name.partition("."), point) for point in _entry_points())
    return {name: point for (kind, _, name), point in found if kind == sort and name}


@functools.cache
def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))
