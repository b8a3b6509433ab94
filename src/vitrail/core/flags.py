"""A parameter that is declared once: for Python, for the command line, for `--help` and for the documentation.

    epochs: Annotated[int | None, flag("Number of passes over the training images.", metavar="N")]

The annotation's type is that of Python; what differs on the command line is stated in the flag.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


class _Unset:
    """The type of `UNSET`."""

    def __repr__(self) -> str:
        return "unset"


UNSET: Any = _Unset()
"""Command-line default of a parameter that has the same default as in Python."""
REQUIRED: Any = dataclasses.MISSING
"""Command-line default of a parameter that has one in Python only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """The metadata of an annotated parameter."""

    help: str
    """Text of `--help` and of the documentation."""
    metavar: str | None = None
    """Placeholder of the value in `--help`."""
    python: str = ""
    """Values that only Python accepts, which the documentation adds to `help`."""
    default: Any = None
    """Default of a key of a `TypedDict`, which cannot state it otherwise."""
    is_positional: bool = False
    """Whether the command line takes it as an argument without a flag."""
    in_cli: bool = True
    """Whether the command line has it."""
    cli_name: str | None = None
    """Name of the flag; None means the parameter's."""
    cli_type: Any = None
    """Type on the command line; None means the annotation's."""
    cli_default: Any = UNSET
    """Default on the command line, if it differs from Python's."""
    read: Callable[[Any], Any] | None = None
    """Converts the command line's value to Python's."""


def flag(help: str, **about: Any) -> Flag:
    """The metadata of a parameter that is a flag."""
    return Flag(help=help, **about)


argument = functools.partial(flag, is_positional=True)
"""The metadata of a parameter that the command line takes without a flag."""

python_only = functools.partial(flag, in_cli=False)
"""The metadata of a parameter that the command line does not have."""


def flag_of(annotation: Any) -> Flag:
    """The flag of an annotation `Annotated[type, flag(...)]`."""
    return next(about for about in annotation.__metadata__ if isinstance(about, Flag))
