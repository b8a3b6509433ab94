"""Metadata of a command's parameters: one declaration for Python, the command line, `--help` and the documentation.

    epochs: Annotated[int | None, flag("Number of passes over the training images.", metavar="N")]

The annotation states the type in Python. `Flag` states what differs on the command line.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


class _Unset:
    """The type of `UNSET`."""

    def __repr__(self) -> str:
        return "unset"


SPEED = "speed and hardware"
RECORDS = "checkpoints and records"
"""Headings of `--help` for less common flags."""

UNSET: Any = _Unset()
"""Command-line default of a parameter that has the same default as in Python."""
REQUIRED: Any = dataclasses.MISSING
"""Command-line default of a parameter that is optional in Python, but required on the command line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """Metadata of a parameter of a command."""

    help: str
    """Text of `--help` and of the documentation."""
    metavar: str | None = None
    """Placeholder of the value in `--help`."""
    group: str = ""
    """Heading of `--help` under which the flag is listed; empty for the most common flags."""
    python: str = ""
    """Values that only Python accepts, which the documentation adds to `help`."""
    default: Any = None
    """Default of a keyword that is declared in a `TypedDict`, which has no syntax for defaults."""
    is_positional: bool = False
    """Whether the command line takes the parameter as an argument without a flag."""
    in_cli: bool = True
    """Whether the command line has the parameter."""
    cli_name: str | None = None
    """Name of the flag; None means the name of the parameter."""
    cli_type: Any = None
    """Type on the command line; None means the type of the annotation."""
    cli_default: Any = UNSET
    """Default on the command line, if it differs from the default in Python."""
    read: Callable[[Any], Any] | None = None
    """Converts the value of the command line to the value in Python."""


def flag(help: str, **fields: Any) -> Flag:
    """Return the metadata of a parameter that is a flag."""
    return Flag(help=help, **fields)


argument = functools.partial(flag, is_positional=True)
"""Return the metadata of a parameter that the command line takes without a flag."""

python_only = functools.partial(flag, in_cli=False)
"""Return the metadata of a parameter that the command line does not have."""


def flag_of(annotation: Any) -> Flag:
    """Return the flag of an annotation `Annotated[type, flag(...)]`."""
    return next(metadata for metadata in annotation.__metadata__ if isinstance(metadata, Flag))
