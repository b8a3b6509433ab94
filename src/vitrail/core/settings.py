"""`Settings`, the base class of all configurations: checked fields, and conversion from and to JSON."""

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from vitrail.core.errors import UsageError, did_you_mean

Pair = tuple[int, int]


class Bounds(NamedTuple):
    """The allowed range of a number, declared on its field: `depth: Annotated[int, Bounds(1, 64)] = 12`.

    On a tuple, it is the range of each number.
    """

    low: float
    high: float = math.inf
    """The largest allowed number."""
    below: float = math.inf
    """An exclusive upper bound, in place of `high`."""
    or_zero: bool = False
    """Whether 0 is also allowed."""

    def check(self, name: str, value: object) -> None:
        """Raise UsageError unless `value` is a number within the bounds."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_inside = self.low <= value <= self.high and value < self.below
            if is_inside or (self.or_zero and value == 0):
                return
        if self.below < math.inf:
            rule = f"a number of at least {self.low:g} and below {self.below:g}"
        else:
            rule = f"{'0 or ' if self.or_zero else ''}a number from {self.low:g} to {self.high:g}"
        raise UsageError(f"{sentence_case(name)} must be {rule}, got {value!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A frozen group of settings.

    Subclasses declare fields, with a docstring under each. A field's type states its allowed values: `Literal[...]`,
    `bool`, `Annotated[int, Bounds(0, 255)]`, a tuple of numbers with bounds, or any of these with `| None`.
    `__post_init__` checks the types; subclasses add rules about several fields.
    """

    title: ClassVar[str] = "Settings"
    """Name of this group in error messages."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names of settings in other libraries, with the name to suggest for each in an error."""

    def __post_init__(self) -> None:
        for name, hint in _field_types(type(self)).items():
            object.__setattr__(self, name, _check_field(name, getattr(self, name), hint))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with changed settings, all of them checked. Raise UsageError for an unknown name."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                aliases = {theirs: ours for theirs, ours in self.aliases.items() if ours in names}
                near = did_you_mean(name, names, aliases)
                raise UsageError(f"Setting must be one of {', '.join(names)}, got {name!r}.{near}")
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return all fields in JSON types."""
        return jsonable(dataclasses.asdict(self))

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return the docstring of each field, preceded by its allowed values if it has a `Literal` type."""
        meanings: dict[str, str] = {}
        hints = typing.get_type_hints(cls)
        for settings in reversed([base for base in cls.__mro__ if issubclass(base, Settings)]):
            body = ast.parse(textwrap.dedent(inspect.getsource(settings))).body[0]
            for field, docstring in itertools.pairwise(ast.iter_child_nodes(body)):
                match field, docstring:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str() as text)):
                        meaning = " ".join(text.split())
                        choices = ", ".join(value for value in _literal_values(hints[name]) if isinstance(value, str))
                        meanings[name] = f"{choices}. {meaning}" if choices else meaning
        return {field.name: meanings.get(field.name, "") for field in dataclasses.fields(cls)}

    def describe(self) -> list[dict[str, Any]]:
        """Return name, value, default (None if there is none) and meaning of each setting, in JSON types."""
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
        """Return the settings of a JSON object: the inverse of `to_json`.

        Raise UsageError for an unknown field, because ignoring it would change the meaning. A missing field takes its
        default, so the default of a new field must be the earlier behaviour: then old files can still be loaded.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict):
            raise UsageError(f"{cls.title} must be a JSON object, got {type(fields).__name__}.")
        if unknown := sorted(fields.keys() - names):
            raise UsageError(f"{cls.title} has unknown fields: {', '.join(unknown)}.")
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


@functools.cache
def _field_types(settings: type[Settings]) -> dict[str, Any]:
    """Return the types of all fields. A field that a subclass redeclares without bounds keeps its bounds."""
    hints: dict[str, Any] = {}
    for base in reversed(settings.__mro__[: settings.__mro__.index(Settings)]):
        for name, hint in typing.get_type_hints(base, include_extras=True).items():
            bounds = [part for part in typing.get_args(hints.get(name)) if isinstance(part, Bounds)]
            hints[name] = Annotated[hint, *bounds] if bounds else hint
    return {field.name: hints[field.name] for field in dataclasses.fields(settings)}


def _check_field(name: str, value: Any, hint: Any, bounds: Bounds | None = None) -> Any:
    """Return the value of a field with Python integers and tuples in place of NumPy integers and lists.

    Raise UsageError unless it has the type `hint`. Other types (`str`, tables, other settings) are not checked.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _check_field(
            name, value, parts[0], next((part for part in parts[1:] if isinstance(part, Bounds)), bounds)
        )
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in parts if part is not type(None)]
        if value is None or len(inner) > 1:
            return value
        if typing.get_origin(inner[0]) is not Literal:
            return _check_field(name, value, inner[0], bounds)
        origin, parts = Literal, (*typing.get_args(inner[0]), None)
    if origin is Literal and value not in parts:
        suggestion = did_you_mean(value, filter(None, parts)) if isinstance(value, str) else ""
        choices = ", ".join(map(str, parts))
        raise UsageError(f"{sentence_case(name)} must be one of {choices}, got {value!r}.{suggestion}")
    if hint is bool and not isinstance(value, bool):
        raise UsageError(f"{sentence_case(name)} must be true or false, got {value!r}.")
    if hint is int and bounds is not None:
        return check_integer(name, value, low=int(bounds.low), high=int(bounds.high))
    if hint is float and bounds is not None:
        bounds.check(name, value)
    elif hint == Pair and bounds is not None:
        return check_pair(name, value, low=int(bounds.low), high=int(bounds.high))
    elif origin is tuple and bounds is not None:
        hints = [parts[0]] * len(value) if parts[1:] == (...,) and isinstance(value, list | tuple) else parts
        if not isinstance(value, list | tuple) or len(value) != len(hints) or not value:
            count = "a list of" if parts[1:] == (...,) else f"{len(parts)}"
            raise UsageError(f"{sentence_case(name)} must be {count} numbers, got {value!r}.")
        return tuple(_check_field(name, number, part, bounds) for number, part in zip(value, hints, strict=True))
    return value


def check_pair(name: str, value: Any, *, low: int, high: int) -> Pair:
    """Return `value` as a pair of integers; a single integer is repeated.

    Raise UsageError unless both are from `low` to `high`.
    """
    sides = value if as_integer(value) is None else (value, value)
    if not isinstance(sides, list | tuple) or len(sides) != 2:
        raise UsageError(f"{sentence_case(name)} must be an integer or a pair [height, width], got {value!r}.")
    first, second = (check_integer(name, side, low=low, high=high) for side in sides)
    return first, second


def check_integer(name: str, value: Any, *, low: int, high: int) -> int:
    """Return `value` as a Python integer, because NumPy's cannot be written as JSON.

    Raise UsageError unless it is an integer from `low` to `high`, both included.
    """
    number = as_integer(value)
    if number is None or not low <= number <= high:
        raise UsageError(f"{sentence_case(name)} must be an integer from {low:,} to {high:,}, got {value!r}.")
    return number


def as_integer(value: Any) -> int | None:
    """Return an integer of Python, NumPy or torch as a Python integer; None for any other value."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def jsonable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with lists in place of tuples, which JSON lacks."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def sentence_case(name: str) -> str:
    """Return a field's name as the start of a sentence: "Crop fraction" for `crop_fraction`."""
    return name.replace("_", " ").capitalize()


def pluralise(count: float, noun: str) -> str:
    """Return a number with its noun: "1 step", "1,200 steps", "0.5 epochs"."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:.3g}"
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def _literal_values(hint: Any) -> tuple[Any, ...]:
    """Return the values of `Literal[...]` or of `Literal[...] | None`."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return tuple(value for part in typing.get_args(hint) for value in _literal_values(part))
    return (None,) if hint is type(None) else typing.get_args(hint)
