"""Registries of kinds by name: built-in ones and those of installed packages.

A package adds a kind through an entry point of the group `vitrail.extensions` called `KIND.NAME`: `family.swin`,
`position.spiral`, `format.flax`, `remote.s3`, `panel.saliency`, `objective.triplet`, `question.texture`,
`augmentation.blur`, `source.lmdb`. Names are read from the packages' metadata, which imports nothing; the code of a
kind is imported when it is first used.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from vitrail.core.errors import UsageError, VitrailError, did_you_mean, first_line

GROUP = "vitrail.extensions"

Kind = TypeVar("Kind")


class Registry(Generic[Kind]):
    """All kinds of one sort, by name. `own` maps the built-in names to `module:attribute`; they take precedence over
    extensions.

    An extension must be a subclass of `base` (`module:attribute`), and its attribute `stated`, if that is given, must
    equal its name.
    """

    def __init__(
        self, sort: str, own: Mapping[str, str], *, base: str | None = None, stated: str | None = None
    ) -> None:
        self.sort, self._own, self._base, self._stated = sort, dict(own), base, stated

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name in _added(self.sort) if name not in self._own)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self._own or name in _added(self.sort))

    def __getitem__(self, name: str) -> Kind:
        """The object registered under a name. Only this one is imported."""
        if isinstance(name, str) and name in self._own:
            return cast(Kind, load_object(self._own[name]))
        self.check(name)
        point, *others = _added(self.sort)[name]
        if others:
            raise VitrailError(
                f"Extension {self.sort}.{name} must come from one package, got {self.provider(name)}."
                " Uninstall all but one."
            )
        try:
            found = point.load()
        except Exception as error:  # whatever a stranger's module raises when it is imported
            raise VitrailError(
                f"Extension {self.sort}.{name} of {self.provider(name)} cannot be used ({first_line(error)})."
            ) from None
        self._check_kind(name, found)
        return found

    def check(self, name: object) -> None:
        """Refuse an unknown name. Nothing is imported."""
        if name not in self:
            near = did_you_mean(str(name), self)
            raise UsageError(f"{self.sort.capitalize()} must be one of {', '.join(self)}, got {name!r}.{near}")

    def _check_kind(self, name: str, found: Any) -> None:
        """Refuse an extension of another type, or one that states another name."""
        subject = f"Extension {self.sort}.{name} of {self.provider(name)}"
        if self._base is not None:
            base = load_object(self._base)
            if not isinstance(found, type) or not issubclass(found, base):
                raise VitrailError(f"{subject} must be a subclass of {base.__name__}, got {found!r}.")
        if self._stated is not None and (stated := getattr(found, self._stated, None)) != name:
            raise VitrailError(f"{subject} must have {self._stated} = {name!r}, got {stated!r}. Rename one of the two.")

    @property
    def built_in(self) -> list[str]:
        """The names that come with vitrail, in their order."""
        return list(self._own)

    @property
    def added(self) -> list[str]:
        """The names that other packages add."""
        return [name for name in self if name not in self._own]

    def provider(self, name: str) -> str | None:
        """The package that adds a name, with its version (all of them, if they are several); None for built-in
        names."""
        if name in self._own or name not in self:
            return None
        packages = [point.dist for point in _added(self.sort)[name]]
        return " and ".join(f"{one.name} {one.version}" if one else "a package without metadata" for one in packages)


def load_object(path: str) -> Any:
    """The object at `module:attribute`."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _added(sort: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a sort by name; several if several packages use the name."""
    found: dict[str, list[EntryPoint]] = {}
    for point in _entry_points():
        kind, _, name = point.name.partition(".")
        if kind == sort and name:
            found.setdefault(name, []).append(point)
    return found


@functools.cache
def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))
