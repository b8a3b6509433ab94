"""The command line: parse arguments, call the function of the command, print its result or error, set the exit code.

Results are printed to stdout, messages to stderr. An error is one line.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from vitrail import __version__
from vitrail.api.commands import COMMANDS, Command, Group
from vitrail.api.help import format_command_help, format_data_help, format_overview
from vitrail.api.output import CliArguments
from vitrail.core.errors import UsageError, VitrailError, did_you_mean, first_line, library_memory_error
from vitrail.core.language import LANGUAGES, messages_in
from vitrail.core.memory import describe_allocation_failure, is_allocation_failure
from vitrail.core.other_tools import OTHER_COMMANDS, our_names
from vitrail.core.terminal import say

DESCRIPTION = "The complete Vision Transformer: define it, train it, look inside it, deploy it."

_MEMORY_ADVICE = {
    "train": "Use a smaller --batch, or --set accumulate=4 activation_checkpointing=true.",
    "finetune": "Use a smaller --batch, or --set accumulate=4 activation_checkpointing=true.",
    "predict": "Use --threads 1: each thread computes a batch of its own.",
    "inspect": "Use fewer images, or show fewer layers with --layers.",
}
"""Advice on saving memory, by command."""
_BUSY_SHARE = 0.25  # of all processors


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its exit code (0, 1, 2, 129, 130 or 143)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    typed = shlex.join(["vitrail", *arguments])
    is_debugging = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    _prepare_streams()
    with contextlib.ExitStack() as stack:
        try:
            if (language := find_language(os.environ)) != "en":
                stack.enter_context(messages_in(language))
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    signal.signal(number, lambda number, _: sys.exit(128 + number))
            if arguments[0] == "--version":
                sys.stdout.write(f"vitrail {__version__}\n")
            else:
                command, values = _parse(arguments)
                _run_command(command, values, typed)
            sys.stdout.flush()
        except VitrailError as error:
            if is_debugging:
                traceback.print_exc()
            _exit_with_message(str(error), error.exit_code)
        except KeyboardInterrupt:
            _exit_with_message("interrupted", 130)
        except BrokenPipeError:
            # The reader has closed the pipe (`| head`).
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - the buffer must not be flushed at exit
            sys.exit(0)
        except Exception as error:
            if is_debugging:
                traceback.print_exc()
            if (memory_error := library_memory_error(error)) is not None:
                _exit_with_message(str(memory_error), memory_error.exit_code)
            if isinstance(error, OSError) and error.strerror:
                sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
                _exit_with_message(f"{error.filename or 'Standard output'} cannot be used ({error.strerror}).", 1)
            if is_allocation_failure(error):
                name = " ".join(arguments[:2]) if arguments[0] == "faces" else arguments[0]
                advice = _MEMORY_ADVICE.get(name, "Use a smaller model or a lower resolution, or close other programs.")
                _exit_with_message(
                    f"Memory must be enough for `vitrail {name}`: {describe_allocation_failure(error)}. {advice}", 1
                )
            # Last resort: any exception that reaches this line is a bug.
            _exit_with_message(f"internal error ({type(error).__name__}): {first_line(error)} (--debug shows where)", 1)


def find_language(environ: Mapping[str, str]) -> str:
    """Return the language that the environment asks for: VITRAIL_LANG, otherwise the locale. The default is English.

    Raise UsageError if VITRAIL_LANG is neither en nor ko. Korean needs streams that can encode it.
    """
    names = ("VITRAIL_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    name, locale = next(((name, environ[name]) for name in names if environ.get(name)), ("", ""))
    code = re.split(r"[_.@-]", locale.lower())[0]  # ko for ko_KR.UTF-8
    if name == "VITRAIL_LANG" and code not in LANGUAGES:
        raise UsageError(f"VITRAIL_LANG must be {' or '.join(LANGUAGES)}, got {locale!r}.")
    return "ko" if code == "ko" and all(map(_can_encode_korean, (sys.stdout, sys.stderr))) else "en"


def _can_encode_korean(stream: object) -> bool:
    try:
        "한국어".encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _prepare_streams() -> None:
    """Replace closed streams by /dev/null, and escape characters that the encoding of a stream lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _parse(arguments: list[str]) -> tuple[Command, dict[str, Any]]:
    """Return the command and the values that the command line states for its parameters.

    Print the help and exit if the arguments ask for it. Exit with code 2 and a message of one line if they are wrong.
    """
    if arguments[0] == "help":
        if arguments[1:] == ["data"]:
            _print_help(format_data_help())
        arguments = [*arguments[1:3], "--help"]
    program, description, commands = "vitrail", DESCRIPTION, COMMANDS
    if isinstance(group := COMMANDS.get(arguments[0]), Group):
        program, description, commands = f"vitrail {arguments[0]}", group.about, group.commands
        arguments = arguments[1:] or ["--help"]
    name = arguments[0]
    if not name.startswith("-") and name not in commands:
        own_name = OTHER_COMMANDS.get(name, "")
        suggestion = did_you_mean(name, [*commands, "--help"], {name: own_name} if own_name in commands else None)
        noun = "Command" if program == "vitrail" else f"Command of `{program}`"
        _exit_with_message(f"{noun} must be one of {', '.join(commands)}, got {name!r}.{suggestion}", 2)
    counts = Counter(argument.partition("=")[0].replace("_", "-") for argument in arguments if argument[:2] == "--")
    if repeated := [flag for flag, count in counts.items() if count > 1]:
        _exit_with_message(
            f"{repeated[0]} must be given once, with all of its values, got it {counts[repeated[0]]} times.", 2
        )
    command = commands.get(name)
    _check_flags(program, arguments, command)
    is_help = not {"--help", "-h"}.isdisjoint(arguments)
    if not isinstance(command, Command):
        if is_help:
            _print_help(format_overview(program, description, commands))
        _exit_with_message(f"{program} needs a command. See --help.", 2)
    if is_help:
        _print_help(format_command_help(program, name, command))
    return command, _parse_values(f"{program} {name}", command, _expand_arguments(arguments)[1:])


def _print_help(text: str) -> NoReturn:
    sys.stdout.write(text)
    sys.stdout.flush()
    sys.exit(0)


def _parse_values(program: str, command: Command, arguments: list[str]) -> dict[str, Any]:
    """Return the values of a command's parameters that differ from their defaults.

    tyro prints its errors in a box; here they become one line.
    """
    import tyro

    def values_of(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value != parameters[name].default}

    parameters = {parameter.name: parameter for parameter in _tyro_parameters(command)}
    values_of.__dict__["__signature__"] = inspect.Signature([*parameters.values()])
    values_of.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(values_of, prog=program, args=arguments)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        _exit_with_message(f"{_shorten_parser_error(box.getvalue())} See --help.", 2)


def _tyro_parameters(command: Command) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command as tyro reads them from a signature."""
    import tyro

    for parameter in command.cli_parameters:
        flag, value_type = parameter.flag, parameter.cli_type
        if parameter.cli_default is None and flag.cli_type is not None:
            value_type |= None
        metadata = tyro.conf.arg(help=flag.help, metavar=flag.metavar, name=flag.cli_name)
        markers = (tyro.conf.Positional, metadata) if flag.is_positional else (metadata,)
        yield inspect.Parameter(
            parameter.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=parameter.cli_default,
            annotation=Annotated[value_type, *markers],
        )


def _run_command(command: Command, values: dict[str, Any], typed: str) -> None:
    """Call the function of a command and print its result. `typed` is the command line, which results record."""
    if command.computes:
        _share_processors()
    arguments = CliArguments(values, json=values.pop("json", False), open=values.pop("open", False))
    flags = {parameter.name: parameter.flag for parameter in command.parameters}
    keywords = {name: value if (read := flags[name].read) is None else read(value) for name, value in values.items()}
    if "command" in flags:
        keywords["command"] = typed
    if "quiet" in flags:
        keywords["quiet"] = False  # in Python the default is quiet, unless in a terminal or notebook
    if command.receiver is not None:
        keywords["receiver"] = functools.partial(command.receiver, arguments)
    command.show(inspect.unwrap(command.function)(**keywords), arguments)


def _check_flags(program: str, arguments: list[str], command: Command | Group | None) -> None:
    """Exit with a message and a suggestion if the command lacks a flag.

    Flags in the forms of other tools are detected, too: `-b 8` and, before any flag, `batch=8`.
    """
    all_flags = _flags(command)
    flags = {form for flag in all_flags for form in (flag, f"--no-{flag[2:]}")} | {"--help", "-h"}
    flags |= {former for name, former in _FORMER_FLAGS if name == arguments[0]}
    first_flag = next((index for index, argument in enumerate(arguments) if argument[:1] == "-"), len(arguments))
    pairs = [
        argument
        for argument in arguments[:first_flag]
        if re.match(r"[A-Za-z]\w+=[^*?\[]*$", argument) and not os.path.lexists(argument)
    ]
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if argument not in pairs and (flag in flags or not re.match(r"--|-(?!inf$|nan$)[A-Za-z]", flag)):
            continue
        suggestion = _suggest_for_foreign_flag(flag, f"{program} {arguments[0]}", command)
        if argument in pairs:
            if not suggestion:
                continue
            flag = argument
        suggestion = suggestion or did_you_mean(flag, [*all_flags, "--help"])
        _exit_with_message(f"Flag must be one that --help lists, got {flag}.{suggestion}", 2)


def _suggest_for_foreign_flag(flag: str, usage: str, command: Command | Group | None) -> str:
    """Return a sentence with a command's flag, argument or recipe setting for a flag of another tool; else ""."""
    from vitrail.models.config import ModelConfig
    from vitrail.training.recipe import setting_keys

    if not isinstance(command, Command):
        return ""
    flags, arguments = _flags(command), _arguments(command)
    settings = setting_keys() if "--set" in flags else {}
    theirs = flag.lstrip("-").replace("-", "_")
    for name in (*our_names(theirs), theirs, ModelConfig.aliases.get(theirs, "")):
        if (ours := f"--{name.replace('_', '-')}") in flags:
            return f" Did you mean {ours!r}?"
        if name in arguments:
            return f" Give it without a flag: {usage} {' '.join(arguments.values())}"
        if name in settings and name not in ("name", "classes", "channels"):  # settings of the model that DATA decides
            return f" Did you mean '--set {settings[name]}'?"
        if " " in name:  # a sentence
            return f" {name}"
    return ""


def _share_processors() -> None:
    """Set OMP_WAIT_POLICY so that idle threads of torch do not spin if other programs use the processors.

    Next to other programs, spinning makes a run many times slower. On an idle machine it is faster, above all for small
    models.
    """
    if "OMP_WAIT_POLICY" not in os.environ and _busy_share() > _BUSY_SHARE:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def _busy_share(seconds: float = 0.1) -> float:
    """Return the share of all processors that is in use, measured over `seconds`; 0 on systems without /proc/stat."""

    def ticks() -> tuple[int, int]:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]
        numbers = [int(field) for field in fields]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and waiting for a disk

    try:
        before, idle_before = ticks()
        time.sleep(seconds)
        after, idle_after = ticks()
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - (idle_after - idle_before) / max(after - before, 1)


_FORMER_FLAGS = {("convert", "--pictures"): "--images"}


def _expand_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments with `--resume auto` for a bare `--resume`, and with flags in place of former names."""
    expanded: list[str] = []
    for argument, following in itertools.pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        flag = _FORMER_FLAGS.get((arguments[0], flag), flag)
        expanded += [argument, "auto"] if argument == "--resume" and following != "auto" else [flag + equals + value]
    for (command, former), flag in _FORMER_FLAGS.items():
        if arguments[0] == command and sum(argument.partition("=")[0] == flag for argument in expanded) > 1:
            _exit_with_message(f"{flag} must be given once (also as {former}, its former name).", 2)
    return expanded


def _flags(command: Command | Group | None) -> list[str]:
    """Return every flag of a command, and `--set KEY` for every setting if it takes a recipe."""
    from vitrail.training.recipe import Recipe

    if not isinstance(command, Command):
        return ["--help", "--version", "--debug"]
    parameters = [parameter for parameter in command.cli_parameters if not parameter.flag.is_positional]
    names = [parameter.flag.cli_name or parameter.name for parameter in parameters]
    settings = [field.name for field in dataclasses.fields(Recipe)] if "set" in names else []
    return [f"--{name.replace('_', '-')}" for name in names] + [f"--set {name}" for name in settings]


def _arguments(command: Command) -> dict[str, str]:
    """Return the placeholder of each argument without a flag, by the name of its parameter."""
    return {
        parameter.name: parameter.flag.metavar or parameter.name
        for parameter in command.cli_parameters
        if parameter.flag.is_positional
    }


def _shorten_parser_error(box: str) -> str:
    """Return an error message of tyro as one sentence, without its frame, title, rules and hints to the help.

    In terminals without box characters, the frame consists of dashes.
    """
    lines = [re.sub(r"[│╭╮╰╯]", " ", line).strip() for line in box.splitlines()]
    rules = [bool(re.search(r"─{3,}|^-{3,}$", line)) for line in lines]
    first = rules.index(True) + 1 if any(rules) else 0
    text = " ".join(line for line, is_rule in zip(lines[first:], rules[first:], strict=True) if line and not is_rule)
    pair = re.search(r"INT INT.*Argument helptext: \S+ ([A-Z]+ [A-Z]+) ", text)
    text = re.split(r"For full helptext|Argument helptext|Arguments similar to|Perhaps you meant", text)[0]
    value = r"(?:instantiated from \[|base 10: |to float: )(.*?)\]?(?:\. |\s*$)"
    if match := re.match(rf"Error parsing (\S+): .*?{value}", text):
        expected = "a number" if re.search("FLOAT|to float", match[0]) else "an integer"
        expected = f"two integers, {pair[1]}" if pair else expected
        text = f"{match[1]} must be {expected}, got {match[2] or 'nothing'}"
    elif match := re.match(r"Error parsing (\S+): Could not find valid parse for arguments: \[(.+?)\]", text):
        text = f"{match[1]} must be integers, got {match[2]}"
    elif match := re.match(r"invalid choice (.+) for argument '(.+)'\. Expected one of \((.+)\)", text):
        choices = sorted(set(re.findall(r"'(.*?)'", match[3])) - {"None"})
        text = f"{match[2]} must be one of {', '.join(choices)}, got {match[1]}"
    elif match := re.match(r"Missing from (.+?): (\S+)", text):
        text = f"{match[1]} needs {match[2]}"
    elif match := re.match(r"Unrecognized options: ([A-Za-z]\w*)=(\S+)", text):
        text = f"Flag must be written with dashes, as --{match[1]} {match[2]}, got {match[1]}={match[2]}"
    return re.sub(r"\s+", " ", text).strip().rstrip(".:") + "."


def _exit_with_message(message: str, code: int) -> NoReturn:
    say(f"vitrail: {message}")
    sys.exit(code)
