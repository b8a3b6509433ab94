"""Text of `vitrail --help`, `vitrail COMMAND --help` and `vitrail help data`. Nothing here imports torch."""

import inspect
import re
import shutil
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from vitrail.api.commands import Command, Group
from vitrail.api.parameters import Parameter
from vitrail.core.language import localise
from vitrail.core.terminal import display_width
from vitrail.data.sources.registry import source_descriptions

_MIN_WIDTH, _MAX_WIDTH = 60, 100  # columns
_NAME_WIDTH = 22  # columns of the names of flags
_FEW_FLAGS = 8  # up to this number, flags are listed without headings


def format_overview(program: str, description: str, commands: Mapping[str, Command | Group]) -> str:
    """Return the help of `vitrail` or of a group such as `vitrail faces`: one line for each command."""
    width = max(map(len, commands))
    rows = [f"  {name:{width}}  {summarise(command)}" for name, command in commands.items()]
    hints = [f"`{program} COMMAND --help` describes a command and its flags."]
    if program == "vitrail":
        hints.append("`vitrail help data` lists all forms of DATA.")
        hints.append("`--version` prints the version. `--debug` adds a traceback to an error.")
    blocks = [
        _in_language(f"usage: {program} COMMAND ..."),
        _in_language(description),
        "\n".join([f"{_in_language('commands')}:", *rows]),
        "\n".join(map(_in_language, hints)),
    ]
    return "\n\n".join(blocks) + "\n"


def format_command_help(program: str, name: str, command: Command) -> str:
    """Return the help of a command: usage, description, arguments, and flags under their headings."""
    arguments = [parameter for parameter in command.cli_parameters if parameter.flag.is_positional]
    flags = [parameter for parameter in command.cli_parameters if not parameter.flag.is_positional]
    required = [parameter for parameter in flags if parameter.is_required_in_cli]
    optional = [parameter for parameter in flags if not parameter.is_required_in_cli]
    usage = [f"usage: {program} {name}", *map(_placeholder, arguments), *map(_flag_names, required)]
    blocks = [
        _wrap(" ".join([_in_language(" ".join(usage)), *([_in_language("[flags]")] if optional else [])]), indent=2)
    ]
    blocks += [_wrap(_in_language(paragraph)) for paragraph in _describe(command).split("\n\n")]
    if arguments:
        rows = [(_placeholder(parameter), _in_language(parameter.flag.help)) for parameter in arguments]
        blocks.append(_format_section("arguments", rows))
    sections: dict[str, list[tuple[str, str]]] = {"flags": []}
    for parameter in (*required, *optional):
        heading = parameter.flag.group if len(flags) > _FEW_FLAGS else ""
        sections.setdefault(heading or "flags", []).append((_flag_names(parameter), _describe_flag(parameter)))
    return "\n\n".join(blocks + [_format_section(heading, rows) for heading, rows in sections.items() if rows]) + "\n"


def format_data_help() -> str:
    """Return the text of `vitrail help data`: all forms of DATA, also those of installed extensions."""
    forms = "\n".join(f"  {_in_language(description)}" for description in source_descriptions())
    title = _in_language("DATA is a set of images with labels, given by a path or a name. It can be:")
    about = _in_language(
        "Splits are taken from DATA if it has them. Otherwise `train` holds out a share of each class, and the other"
        " commands use all images. `vitrail doctor DATA` checks a data set."
    )
    return f"{title}\n\n{forms}\n\n{_wrap(about)}\n"


def summarise(command: Command | Group) -> str:
    """Return the first sentence of a command's description, without the full stop."""
    return _in_language(re.split(r"(?<=\.)\s", _describe(command))[0]).removesuffix(".")


def _in_language(text: str) -> str:
    """Return a text of the help in the language of the command line, on one line."""
    return localise(" ".join(text.split()), "help")


def _describe(command: Command | Group) -> str:
    """Return the description of a command: the docstring of its function without the example."""
    text = command.about if isinstance(command, Group) else inspect.unwrap(command.function).__doc__ or ""
    return inspect.cleandoc(text.partition(">>>")[0]).strip()


def _flag_names(parameter: Parameter) -> str:
    """Return a flag as the help shows it, such as `--batch N`."""
    name = (parameter.flag.cli_name or parameter.name).replace("_", "-")
    if parameter.cli_type is not bool:
        return f"--{name} {_placeholder(parameter)}"
    return f"--{name}, --no-{name}" if parameter.cli_default is True else f"--{name}"


def _placeholder(parameter: Parameter) -> str:
    """Return the placeholder of a value, such as `N`, `{a,b}` or, for any number of values, `IMAGE ...`."""
    value_type = _without_none(parameter.cli_type)
    choices = f"{{{','.join(map(str, get_args(value_type)))}}}" if get_origin(value_type) is Literal else ""
    placeholder = parameter.flag.metavar or choices or parameter.name.upper()
    if get_origin(value_type) is not tuple or get_args(value_type)[1:] != (...,):
        return placeholder
    return f"{placeholder[:-1]} ...]" if placeholder.endswith("]") else f"{placeholder} ..."


def _without_none(value_type: Any) -> Any:
    """Return `X` for the type `X | None`."""
    if get_origin(value_type) not in (types.UnionType, Union):
        return value_type
    return next(part for part in get_args(value_type) if part is not type(None))


def _describe_flag(parameter: Parameter) -> str:
    """Return the description of a flag with its default, or that it is required."""
    default, description = parameter.cli_default, _in_language(parameter.flag.help)
    if parameter.is_required_in_cli:
        return f"{description} {_in_language('(required)')}"
    if default is None or default is False or default in ("", ()):
        return description
    default = _in_language(f"(default: {'yes' if default is True else default})")
    return f"{description} {default}"


def _format_section(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a heading and rows of a name and its description; a long name has a line of its own."""
    lines = [f"{_in_language(heading)}:"]
    for name, text in rows:
        description = _wrap(text, indent=_NAME_WIDTH + 4, first_indent=_NAME_WIDTH + 4)
        if len(name) <= _NAME_WIDTH:
            lines.append(f"  {name:{_NAME_WIDTH}}  {description.lstrip()}")
        else:
            lines += [f"  {name}", description]
    return "\n".join(lines)


def _wrap(text: str, *, indent: int = 0, first_indent: int = 0) -> str:
    """Return text wrapped to the width of the terminal."""
    width = min(max(shutil.get_terminal_size().columns, _MIN_WIDTH), _MAX_WIDTH)
    lines, line = [], " " * first_indent
    for word in text.split():
        if line.strip() and display_width(f"{line} {word}") > width:
            lines.append(line)
            line = " " * indent
        line += f" {word}" if line.strip() else word
    return "\n".join([*lines, line])
