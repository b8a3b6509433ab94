"""The command line: words to a call, mistakes to one line, every way out to its exit code.

Data goes to stdout, words about it to stderr.
"""

import contextlib
import functools
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tyro

from vitrail import __version__
from vitrail.commands import COMMANDS, given_words
from vitrail.console import say
from vitrail.errors import VitrailError, did_you_mean

DESCRIPTION = """The Vision Transformer, whole: define it, train it, look inside it, ship it.

Errors are one line; add --debug for the traceback. --version prints the version."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with the contract's exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    given_words.set(tuple(words))
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    _prepare_streams()
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        if words[0] == "--version":
            sys.stdout.write(f"vitrail {__version__}\n")
        else:
            _parse(words)()
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
        if isinstance(error, OSError) and error.strerror:
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
            _leave(f"{error.filename or 'Standard output'} cannot be used ({error.strerror}).", 1)
        # A net, not a cure: whatever lands here should have been foreseen where it happens.
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        _leave(f"internal error ({type(error).__name__}): {reason} (--debug shows where)", 1)


def _prepare_streams() -> None:
    """Closed streams swallow what is written; a terminal that lacks a character shows a substitute."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _parse(words: list[str]) -> Callable[[], None]:
    """Turn words into a call. tyro explains mistakes in a box; we say them in one line."""
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        _leave(f"Command must be one of {known}, got {words[0]!r}.{did_you_mean(words[0], COMMANDS)}", 2)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.extras.subcommand_cli_from_dict(
                {name: _delayed(command) for name, command in COMMANDS.items()},
                prog="vitrail", description=DESCRIPTION, args=words, sort_subcommands=False,
            )  # fmt: skip
    except SystemExit as leaving:
        if leaving.code != 2:
            raise
        _leave(_in_one_line(complaint.getvalue()), 2)


def _delayed(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """The same signature, but the call comes later: what the command prints must not be caught as a complaint."""

    @functools.wraps(command)
    def parsed(*positional: Any, **named: Any) -> Callable[[], None]:
        return functools.partial(command, *positional, **named)

    parsed.__annotations__ = {**command.__annotations__, "return": Callable[[], None]}
    return parsed


def _in_one_line(box: str) -> str:
    """The message inside one of tyro's boxes (of dashes, in a terminal without the others), without frame, title, rules
    and pointers to the help."""
    lines = [re.sub(r"[│╭╮╰╯]", " ", line).strip() for line in box.splitlines()]
    rules = [bool(re.search(r"─{3,}|^-{3,}$", line)) for line in lines]
    first = rules.index(True) + 1 if any(rules) else 0
    words = " ".join(line for line, is_rule in zip(lines[first:], rules[first:], strict=True) if line and not is_rule)
    words = re.split(r"For full helptext|Argument helptext|Arguments similar to|Perhaps you meant", words)[0]
    if wrong := re.match(r"Error parsing (\S+): .*?(?:instantiated from \[|base 10: )(.+?)\]?(?:\. |\s*$)", words):
        words = f"{wrong[1]} must be a whole number, got {wrong[2]}"
    elif wrong := re.match(r"Error parsing (\S+): Could not find valid parse for arguments: \[(.+?)\]", words):
        words = f"{wrong[1]} must be whole numbers, got {wrong[2]}"
    elif missing := re.match(r"Missing from (.+?): (\S+)", words):
        words = f"{missing[1]} needs {missing[2]}"
    return re.sub(r"\s+", " ", words).strip().rstrip(".:") + ". See --help."


def _leave(message: str, code: int) -> NoReturn:
    say(f"vitrail: {message}")
    sys.exit(code)
