"""The command line. Data goes to stdout, words about it to stderr; heavy imports wait until a command needs them."""

import contextlib
import functools
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
from tyro.conf import arg

from vitrail import __version__
from vitrail.configs import zoo
from vitrail.configs.base import ModelConfig
from vitrail.configs.bundle import check_folder, read_config
from vitrail.errors import UsageError, VitrailError, did_you_mean

DESCRIPTION = """The Vision Transformer, whole: define it, train it, look inside it, ship it.

Errors are one line; add --debug for the traceback. --version prints the version."""

Json = Annotated[bool, arg(help="Print one JSON document instead of a table.")]


Data = Annotated[
    str,
    tyro.conf.Positional,
    arg(
        metavar="DATA",
        help="A folder of class folders (perhaps in train, val, test), an idx folder, a .npz, a .csv, digits or"
        " fashion-mnist.",
    ),
]


def models(*, json: Json = False) -> None:
    """List every model by its name, with parameters, multiply-accumulates and shapes."""
    rows = [config.info() for config in zoo.MODELS.values()]
    if json:
        return _print_json(rows)
    headers = ("name", "family", "parameters", "MACs", "tokens", "resolution", "patch", "width", "depth", "heads")
    keys = [header.lower() for header in headers]
    return _print_table(headers, [[_cell(key, row[key]) for key in keys] for row in rows])


def info(
    model: Annotated[
        str, tyro.conf.Positional, arg(metavar="MODEL|BUNDLE", help="A name of `vitrail models`, or a bundle.")
    ],
    *,
    resolution: Annotated[str | None, arg(metavar="R", help="Input size: 384, or 224x384 for height x width.")] = None,
    classes: Annotated[int | None, arg(metavar="K", help="Number of classes.")] = None,
    channels: Annotated[int | None, arg(metavar="C", help="Input channels.")] = None,
    pool: Annotated[str | None, arg(metavar="P", help="What the head reads: cls, gap or map.")] = None,
    representation: Annotated[
        str | None, arg(metavar="W", help="Hidden layer of the head, for pre-training: none, tanh or gelu.")
    ] = None,
    json: Json = False,
) -> None:
    """What a model is and costs, by arithmetic alone: no weights are loaded."""
    config = _find_config(model)
    changes: dict[str, Any] = {
        "resolution": None if resolution is None else _parse_resolution(resolution),
        "classes": classes, "channels": channels, "pool": pool, "representation": representation,
    }  # fmt: skip
    row = config.replace(**{key: value for key, value in changes.items() if value is not None}).info()
    if json:
        return _print_json(row)
    return _print_table(None, [[key, _cell(key, value)] for key, value in row.items()])


def doctor(
    data: Data,
    *,
    json: Json = False,
) -> None:
    """Look for what would spoil training: unreadable files, duplicates across splits, classes that do not fit.

    Exit code 1 if something would break training, 0 if there are warnings or nothing.
    """
    from vitrail.data.doctor import examine
    from vitrail.data.sources import open_data

    dataset = open_data(data)
    findings = examine(dataset)
    if json:
        _print_json({"findings": [finding.to_json() for finding in findings]})
    else:
        counts = ", ".join(f"{len(split):,} {name}" for name, split in dataset.splits.items())
        _print_table(None, [["data", data], ["pictures", counts], ["classes", f"{len(dataset.labels):,}"]])
        rows = [[one.severity, one.kind, one.message, *_shorten(one.files)] for one in findings]
        if rows:
            sys.stdout.write("\n")
            _print_table(("severity", "kind", "what", "files"), rows)
        else:
            sys.stdout.write("\nnothing to complain about\n")
    if any(finding.severity == "error" for finding in findings):
        sys.exit(1)


def demo(
    *,
    output: Annotated[Path, arg(metavar="DIR", help="Folder to write.")] = Path("demo"),
    epochs: Annotated[int, arg(metavar="N", help="How often to go through the training digits.")] = 100,
    seed: Annotated[int, arg(metavar="S", help="Same seed, same machine, same model.")] = 0,
    force: Annotated[bool, arg(help="Overwrite the output if it exists.")] = False,
) -> None:
    """Train a small Vision Transformer on 1,437 embedded digits, test it on 360 others, and look where it looks."""
    from vitrail.demo import run

    run(output, epochs=epochs, seed=seed, force=force)


COMMANDS: dict[str, Callable[..., None]] = {"models": models, "info": info, "doctor": doctor, "demo": demo}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with the contract's exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
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
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        if debug:
            traceback.print_exc()
        _leave(f"{error.filename or 'Standard output'} cannot be used ({error.strerror}).", 1)


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
    """The message inside one of tyro's boxes, without frame, rules and pointers to the help."""
    inside = [re.sub(r"[│╭╮╰╯]", " ", line).strip() for line in box.splitlines()]
    words = " ".join(line for line in inside if line and not re.search(r"─{3,}", line))
    words = re.split(r"For full helptext|Argument helptext|Arguments similar to|Perhaps you meant", words)[0]
    if wrong := re.match(r"Error parsing (\S+): .*?(?:instantiated from \[|base 10: )(.+?)\]?(?:\. |\s*$)", words):
        words = f"{wrong[1]} must be a whole number, got {wrong[2]}"
    elif missing := re.match(r"Missing from (.+?): (\S+)", words):
        words = f"{missing[1]} needs {missing[2]}"
    return re.sub(r"\s+", " ", words).strip().rstrip(".:") + ". See --help."


def _find_config(model: str) -> ModelConfig:
    """The configuration behind a name, or else of the bundle at a path."""
    if model in zoo.MODELS:
        return zoo.MODELS[model]
    path = Path(model)
    try:
        exists = bool(model) and path.exists()
    except (OSError, ValueError):  # no file can have such a name
        exists = False
    if exists:
        return read_config(check_folder(path))
    raise UsageError(
        f"Model must be a name that `vitrail models` lists, or a bundle that exists, got {model!r}."
        f"{did_you_mean(model, zoo.MODELS)}"
    )


def _parse_resolution(text: str) -> tuple[int, int]:
    sides = re.fullmatch(r"(\d{1,99})(?:[x,](\d{1,99}))?", text)
    if not sides:
        raise UsageError(f"Resolution must be a number such as 384 or height x width such as 224x384, got {text!r}.")
    return int(sides[1]), int(sides[2] or sides[1])


def _print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")


def _print_table(headers: Sequence[str] | None, rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*(headers or ()), box=None, pad_edge=False, show_header=headers is not None)
    for row in rows:
        table.add_row(*map(Text, row))  # names are text, not markup
    # Piped output has no width of its own: never cut it.
    console = Console(width=None if sys.stdout.isatty() else 200)
    with console.capture() as captured:
        console.print(table)
    sys.stdout.write(captured.get())


def _shorten(files: Sequence[str], most: int = 4) -> list[str]:
    rest = len(files) - most
    return [" ".join(files[:most]) + (f" and {rest:,} more" if rest > 0 else "")]


def _cell(key: str, value: Any) -> str:
    match value:
        case None:
            return "-"
        case [height, width]:
            return f"{height}x{width}"
        case int():
            return f"{value:,}"
    return str(value)


def _leave(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"vitrail: {message}\n")
    sys.exit(code)
