"""Settings that check themselves: the base of every configuration, and its way to and from JSON."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from vitrail.errors import UsageError, did_you_mean

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen group of settings. Subclasses list fields with a docstring each and check them in `__post_init__`."""

    title: ClassVar[str] = "Settings"
    """What error messages call this group."""

    def replace(self, **changes: Any) -> Self:
        """These settings with some of them changed, checked anew."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise UsageError(f"Setting must be one of {', '.join(known)}, got {name!r}.{did_you_mean(name, known)}")
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Every field, in JSON's types."""
        return jsonable(dataclasses.asdict(self))

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """What the docstring under each field says, and before it the words that the field may hold."""
        found: dict[str, str] = {}
        hints = typing.get_type_hints(cls)
        for kind in reversed([kind for kind in cls.__mro__ if issubclass(kind, Settings)]):
            body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
            for field, text in itertools.pairwise(ast.iter_child_nodes(body)):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as said)):
                        words = ", ".join(word for word in _literal_words(hints[name]) if isinstance(word, str))
                        found[name] = f"{words}. {' '.join(said.split())}" if words else " ".join(said.split())
        return {field.name: found.get(field.name, "") for field in dataclasses.fields(cls)}

    def describe(self) -> list[dict[str, Any]]:
        """For each setting its name, value, default (null where it has none) and meaning, as JSON."""
        defaults = {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(self)
        }
        values, meanings = self.to_json(), self.meanings()
        return [
            {"setting": name, "value": values[name], "default": default, "meaning": meanings[name]}
            for name, default in jsonable(defaults).items()
        ]

    @classmethod
    def from_json(cls, fields: object) -> Self:
        """The inverse of `to_json`. An unknown field is refused: ignoring it would give another thing.

        A missing one takes its default. A field that is added later must therefore default to what was built in before,
        and old files load for ever.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict):
            raise UsageError(f"{cls.title} must be a JSON object, got {type(fields).__name__}.")
        if unknown := sorted(fields.keys() - known):
            raise UsageError(f"{cls.title} has unknown fields: {', '.join(unknown)}.")
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})

    def _set_pair(self, name: str, *, low: int, high: int) -> None:
        """The field holds two integers; one alone stands for both."""
        value = getattr(self, name)
        sides = (value, value) if isinstance(value, int) else value
        if not isinstance(sides, list | tuple) or len(sides) != 2:
            raise UsageError(f"{spoken(name)} must be an integer or a pair [height, width], got {value!r}.")
        for side in sides:
            check_integer(name, side, low=low, high=high)
        object.__setattr__(self, name, tuple(sides))

    def _check_choices(self, names: Iterable[str]) -> None:
        """The named fields hold one of the words that their `Literal` type lists."""
        hints = typing.get_type_hints(type(self))
        for name in names:
            words = _literal_words(hints[name])
            value = getattr(self, name)
            if value not in words:
                suggestion = did_you_mean(value, filter(None, words)) if isinstance(value, str) else ""
                listed = ", ".join(map(str, words))
                raise UsageError(f"{spoken(name)} must be one of {listed}, got {value!r}.{suggestion}")

    def _check_flags(self, names: Iterable[str]) -> None:
        """The named fields are true or false."""
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{spoken(name)} must be true or false, got {getattr(self, name)!r}.")


def check_integer(name: str, value: object, *, low: int, high: int) -> None:
    """`value` is an integer between `low` and `high`, both included."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{spoken(name)} must be an integer from {low:,} to {high:,}, got {value!r}.")


def check_number(name: str, value: object, *, low: float, below: float) -> None:
    """`value` is a number with `low <= value < below`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < below:
        raise UsageError(f"{spoken(name)} must be a number of at least {low:g} and below {below:g}, got {value!r}.")


def check_share(name: str, value: object, high: float) -> None:
    """`value` is a number from 0 to `high`, both included."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
        raise UsageError(f"{spoken(name)} must be a number from 0 to {high:g}, got {value!r}.")


def jsonable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where Python has tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def spoken(name: str) -> str:
    """A field's name as a sentence begins with it."""
    return name.replace("_", " ").capitalize()


def _literal_words(hint: Any) -> tuple[Any, ...]:
    """The words of `Literal[...]` or of `Literal[...] | None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return tuple(word for part in typing.get_args(hint) for word in _literal_words(part))
    return (None,) if hint is type(None) else typing.get_args(hint)
