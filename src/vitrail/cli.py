"""The command line: parses arguments, prints errors in one line and sets exit codes.

Results go to stdout, messages to stderr.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import tyro

from vitrail import __version__
from vitrail.api.commands import COMMANDS, Command, Group
from vitrail.api.flags import Parameter
from vitrail.api.output import Given
from vitrail.core.errors import VitrailError, did_you_mean, first_line, library_memory_error
from vitrail.core.flags import REQUIRED, UNSET
from vitrail.core.memory import describe_allocation_failure, is_allocation_failure
from vitrail.core.other_tools import OTHER_COMMANDS, our_names
from vitrail.core.terminal import say

DESCRIPTION = """The complete Vision Transformer: define it, train it, look inside it, deploy it.

Errors are one line; add --debug for the traceback. --version prints the version."""


_COMPUTING = ("train", "finetune", "evaluate", "demo")
_LESS_MEMORY = {
    "train": "Use a smaller --batch, or --set accumulate=4 activation_checkpointing=true.",
    "finetune": "Use a smaller --batch, or --set accumulate=4 activation_checkpointing=true.",
    "predict": "Use --threads 1: each thread computes a batch of its own.",
    "inspect": "Give fewer images, or --layers to show some of the layers.",
}
"""What saves memory, by command."""
_BUSY = 0.25  # share of the processors that others use


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its exit code (0, 1, 2, 129, 130 or 143)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    typed = shlex.join(["vitrail", *words])
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    _prepare_streams()
    if _find_place(words).words[0] in _COMPUTING:
        _share_processors()
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        if words[0] == "--version":
            sys.stdout.write(f"vitrail {__version__}\n")
        else:
            command, values = _parse(words)
            _run(command, values, typed)
        sys.stdout.flush()
    except VitrailError as error:
        if debug:
            traceback.print_exc()
        _leave(str(error), error.exit_code)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except BrokenPipeError:
        # The reader has left (`| head`): nothing more to say.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - what is buffered must not be flushed at exit
        sys.exit(0)
    except Exception as error:
        if debug:
            traceback.print_exc()
        if (memory_error := library_memory_error(error)) is not None:
            _leave(str(memory_error), memory_error.exit_code)
        if isinstance(error, OSError) and error.strerror:
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
            _leave(f"{error.filename or 'Standard output'} cannot be used ({error.strerror}).", 1)
        if is_allocation_failure(error):
            place = " ".join(words[:2]) if words[0] == "faces" else words[0]
            advice = _LESS_MEMORY.get(place, "Use a smaller model or a lower resolution, or close other programs.")
            _leave(f"Memory must be enough for `vitrail {place}`: {describe_allocation_failure(error)}. {advice}", 1)
        # Last resort: any exception that reaches this line is a bug.
        _leave(f"internal error ({type(error).__name__}): {first_line(error)} (--debug shows where)", 1)


def _prepare_streams() -> None:
    """Discard output to closed streams, and replace characters that the terminal's encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class Place(NamedTuple):
    """Where the words of a command line lead: for `faces enroll ...`, to the commands of `vitrail faces`."""

    program: str
    description: str
    commands: Mapping[str, Command | Group]
    words: list[str]
    """Remaining arguments, starting at the subcommand."""


def _find_place(words: list[str]) -> Place:
    group = COMMANDS.get(words[0])
    if isinstance(group, Group):
        return Place(f"vitrail {words[0]}", group.about, group.commands, words[1:] or ["--help"])
    return Place("vitrail", DESCRIPTION, COMMANDS, words)


def _parse(words: list[str]) -> tuple[Command, dict[str, Any]]:
    """The command, and the values of the parameters that were given. tyro prints errors in a box; they become one line
    here."""
    if words[0] == "help":
        words = [*words[1:3], "--help"]
    program, description, commands, words = _find_place(words)
    if not words[0].startswith("-") and words[0] not in commands:
        other = OTHER_COMMANDS.get(words[0], "")
        near = did_you_mean(words[0], [*commands, "--help"], {words[0]: other} if other in commands else None)
        kind = "Command" if program == "vitrail" else f"Command of `{program}`"
        _leave(f"{kind} must be one of {', '.join(commands)}, got {words[0]!r}.{near}", 2)
    flags = Counter(word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--"))
    if twice := [flag for flag, count in flags.items() if count > 1]:
        _leave(f"{twice[0]} must be given once, with all of its values, got it {flags[twice[0]]} times.", 2)
    command = commands.get(words[0])
    _check_flags(program, words, command)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            if isinstance(command, Command):
                program, words = f"{program} {words[0]}", _fill_in(words)[1:]
                return command, tyro.cli(_parser_of(command), prog=program, args=words)
            parsers = {name: _parser_of(command) for name, command in commands.items()}
            tyro.extras.subcommand_cli_from_dict(  # --help, which exits
                parsers, prog=program, description=description, args=words, sort_subcommands=False
            )
            _leave(f"{program} needs a command. See --help.", 2)
    except SystemExit as leaving:
        if leaving.code != 2:
            raise
        _leave(f"{_in_one_line(complaint.getvalue())} See --help.", 2)


def _parser_of(command: Command | Group) -> Callable[..., dict[str, Any]]:
    """A function with the signature of the command line, which returns the values that differ from their defaults; of
    a group, the text for --help only."""

    def parse(**values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value != parameters[name].default}

    parameters = {parameter.name: parameter for parameter in _cli_parameters(command)}
    parse.__dict__["__signature__"] = inspect.Signature([*parameters.values()])
    parse.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    about = command.about if isinstance(command, Group) else inspect.unwrap(command.function).__doc__ or ""
    parse.__doc__ = about.partition(">>>")[0].rstrip()
    return parse


def parameters_of(command: Command) -> tuple[Parameter, ...]:
    """All parameters of a command's function."""
    return command.function.__dict__["parameters"]


def _cli_parameters(command: Command | Group) -> Iterator[inspect.Parameter]:
    if isinstance(command, Group):
        return
    keyword = inspect.Parameter.KEYWORD_ONLY
    for parameter in parameters_of(command):
        flag = parameter.flag
        if not flag.in_cli:
            continue
        default = parameter.default if flag.cli_default is UNSET else flag.cli_default
        if default is REQUIRED:
            default = inspect.Parameter.empty
        kind = parameter.type if flag.cli_type is None else flag.cli_type
        if default is None and flag.cli_type is not None:
            kind |= None
        about = _arg(help=flag.help, metavar=flag.metavar, name=flag.cli_name)
        marks = (tyro.conf.Positional, about) if flag.is_positional else (about,)
        yield inspect.Parameter(parameter.name, keyword, default=default, annotation=Annotated[kind, *marks])
    for name, text in (("json", command.json), ("open", command.open)):
        if text is not None:
            yield inspect.Parameter(name, keyword, default=False, annotation=Annotated[bool, _arg(help=text)])


def _show_default(value: str) -> str:
    """How --help shows a default; not at all if the flag is then simply absent."""
    return "" if value in ("None", "") else f"(default: {value})"


_arg = functools.partial(tyro.conf.arg, help_behavior_hint=_show_default)


def _run(command: Command, values: dict[str, Any], typed: str) -> None:
    """Call the function of a command, and print its result."""
    given = Given(values, json=values.pop("json", False), open=values.pop("open", False))
    flags = {parameter.name: parameter.flag for parameter in parameters_of(command)}
    keywords = {name: value if (read := flags[name].read) is None else read(value) for name, value in values.items()}
    if "command" in flags:
        keywords["command"] = typed
    if "quiet" in flags:
        keywords["quiet"] = False  # functions are quiet where nobody watches
    if command.receiver is not None:
        keywords["receiver"] = command.receiver(given)
    command.show(inspect.unwrap(command.function)(**keywords), given)


def _check_flags(program: str, words: list[str], command: Command | Group | None) -> None:
    """Refuse a flag that the command does not have, also in the forms of other tools: `-b 8` and, before any flag,
    `batch=8`."""
    all_flags = _flags(command)
    flags = {form for flag in all_flags for form in (flag, f"--no-{flag[2:]}")} | {"--help", "-h"}
    flags |= {former for name, former in _FORMER_FLAGS if name == words[0]}
    first_flag = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    pairs = [
        word for word in words[:first_flag] if re.match(r"[A-Za-z]\w+=[^*?\[]*$", word) and not os.path.lexists(word)
    ]
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if word not in pairs and (flag in flags or not re.match(r"--|-(?!inf$|nan$)[A-Za-z]", flag)):
            continue
        near = _like_other_tools(flag, f"{program} {words[0]}", command)
        if word in pairs and not near:
            continue
        typed, near = (word, near) if word in pairs else (flag, near or did_you_mean(flag, [*all_flags, "--help"]))
        _leave(f"Flag must be one that --help lists, got {typed}.{near}", 2)


def _like_other_tools(flag: str, usage: str, command: Command | Group | None) -> str:
    """What the command has for a flag of another tool: a flag, an argument without one, or a setting of its recipe."""
    from vitrail.models.config import ModelConfig
    from vitrail.training.recipe import setting_keys

    if not isinstance(command, Command):
        return ""
    flags, arguments = _flags(command), _arguments(command)
    settings = setting_keys() if "--set" in flags else {}
    theirs = flag.lstrip("-").replace("-", "_")
    for word in (*our_names(theirs), theirs, ModelConfig.aliases.get(theirs, "")):
        if (ours := f"--{word.replace('_', '-')}") in flags:
            return f" Did you mean {ours!r}?"
        if word in arguments:
            return f" Give it without a flag: {usage} {' '.join(arguments.values())}"
        if word in settings and word not in ("name", "classes", "channels"):  # of the model; DATA decides them
            return f" Did you mean '--set {settings[word]}'?"
        if " " in word:
            return f" {word}"
    return ""


def _share_processors() -> None:
    """Let torch's threads wait without spinning if other programs compute: beside them, spinning makes a run many times
    slower. On an idle machine spinning is faster, above all for small models."""
    if "OMP_WAIT_POLICY" not in os.environ and _busy_share() > _BUSY:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def _busy_share(seconds: float = 0.1) -> float:
    """How much of all processors was in use, over a moment; 0 where the system does not tell."""

    def ticks() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]  # idle, and waiting for a disk

    try:
        before, idle_before = ticks()
        time.sleep(seconds)
        after, idle_after = ticks()
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - (idle_after - idle_before) / max(after - before, 1)


_FORMER_FLAGS = {("convert", "--pictures"): "--images"}


def _fill_in(words: list[str]) -> list[str]:
    """`--resume` alone means `--resume auto`; flags may be called by their former names."""
    filled: list[str] = []
    for word, following in itertools.pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        flag = _FORMER_FLAGS.get((words[0], flag), flag)
        filled += [word, "auto"] if word == "--resume" and following != "auto" else [flag + equals + value]
    for (command, former), flag in _FORMER_FLAGS.items():
        if words[0] == command and sum(word.partition("=")[0] == flag for word in filled) > 1:
            _leave(f"{flag} must be given once (also as {former}, its former name).", 2)
    return filled


def _flags(command: Command | Group | None) -> list[str]:
    """Every flag of a command, and `--set KEY` for every setting if it takes a recipe."""
    from vitrail.training.recipe import Recipe

    if not isinstance(command, Command):
        return ["--help", "--version", "--debug"]
    parameters = [parameter for parameter in parameters_of(command) if parameter.flag.in_cli]
    names = [one.flag.cli_name or one.name for one in parameters if not one.flag.is_positional]
    names += [name for name in ("json", "open") if getattr(command, name) is not None]
    settings = [field.name for field in dataclasses.fields(Recipe)] if "set" in names else []
    return [f"--{name.replace('_', '-')}" for name in names] + [f"--set {name}" for name in settings]


def _arguments(command: Command) -> dict[str, str]:
    """How --help calls each argument without a flag."""
    return {
        parameter.name: parameter.flag.metavar or parameter.name
        for parameter in parameters_of(command)
        if parameter.flag.is_positional
    }


def _in_one_line(box: str) -> str:
    """The message in one of tyro's boxes, without frame, title, rules and hints to the help. The frame is of dashes in
    terminals without box characters."""
    lines = [re.sub(r"[│╭╮╰╯]", " ", line).strip() for line in box.splitlines()]
    rules = [bool(re.search(r"─{3,}|^-{3,}$", line)) for line in lines]
    first = rules.index(True) + 1 if any(rules) else 0
    words = " ".join(line for line, is_rule in zip(lines[first:], rules[first:], strict=True) if line and not is_rule)
    pair = re.search(r"INT INT.*Argument helptext: \S+ ([A-Z]+ [A-Z]+) ", words)
    words = re.split(r"For full helptext|Argument helptext|Arguments similar to|Perhaps you meant", words)[0]
    value = r"(?:instantiated from \[|base 10: |to float: )(.*?)\]?(?:\. |\s*$)"
    if wrong := re.match(rf"Error parsing (\S+): .*?{value}", words):
        kind = "a number" if re.search("FLOAT|to float", wrong[0]) else "an integer"
        kind = f"two integers, {pair[1]}" if pair else kind
        words = f"{wrong[1]} must be {kind}, got {wrong[2] or 'nothing'}"
    elif wrong := re.match(r"Error parsing (\S+): Could not find valid parse for arguments: \[(.+?)\]", words):
        words = f"{wrong[1]} must be integers, got {wrong[2]}"
    elif wrong := re.match(r"invalid choice (.+) for argument '(.+)'\. Expected one of \((.+)\)", words):
        choices = sorted(set(re.findall(r"'(.*?)'", wrong[3])) - {"None"})
        words = f"{wrong[2]} must be one of {', '.join(choices)}, got {wrong[1]}"
    elif missing := re.match(r"Missing from (.+?): (\S+)", words):
        words = f"{missing[1]} needs {missing[2]}"
    elif setting := re.match(r"Unrecognized options: ([A-Za-z]\w*)=(\S+)", words):
        words = f"Flag must be written with dashes, as --{setting[1]} {setting[2]}, got {setting[1]}={setting[2]}"
    return re.sub(r"\s+", " ", words).strip().rstrip(".:") + "."


def _leave(message: str, code: int) -> NoReturn:
    say(f"vitrail: {message}")
    sys.exit(code)
