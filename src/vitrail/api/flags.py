"""Parameters that several commands share, and `command`, which makes a public function of one.

A command is a function whose annotated parameters are its flags, its `--help` and its documentation (`core.flags`).
"""

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

from vitrail.core.errors import UsageError, did_you_mean
from vitrail.core.flags import REQUIRED, Flag, argument, flag, flag_of, python_only
from vitrail.core.other_tools import suggest_our_name
from vitrail.core.settings import as_integer, sentence_case
from vitrail.data.sources.registry import describe_sources
from vitrail.inference.registry import ENGINES, PRECISIONS
from vitrail.training.options import RunOptions
from vitrail.training.recipe import Recipe

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.data.sources.registry import AnyData
    from vitrail.training.callback import Callback

Function = TypeVar("Function", bound=Callable[..., Any])


def parse_resolution(text: str) -> tuple[int, int]:
    """Height and width from `384` or `224x384`."""
    sides = re.fullmatch(r"(\d{1,99})(?:[x,](\d{1,99}))?", text)
    if not sides:
        raise UsageError(f"Resolution must be a number such as 384 or height x width such as 224x384, got {text!r}.")
    return int(sides[1]), int(sides[2] or sides[1])


def as_pair(resolution: object) -> tuple[int, int]:
    """Height and width from Python's integer or pair."""
    sides = resolution if isinstance(resolution, list | tuple) else (resolution, resolution)
    match [as_integer(side) for side in sides]:
        case int() as height, int() as width:
            return height, width
    raise UsageError(f"Resolution must be an integer or a pair (height, width), got {resolution!r}.")


resolution_flag = functools.partial(flag, metavar="R", cli_type=str, read=parse_resolution)
folder_flag = functools.partial(flag, metavar="DIR", cli_type=Path)
file_flag = functools.partial(flag, metavar="FILE", cli_type=Path)

_bundle = functools.partial(
    argument,
    "A folder written by train, finetune or convert, or the embedded bundle fashion.",
    metavar="BUNDLE",
    cli_type=str,
)
BundlePath = Annotated["str | Path | Bundle", _bundle(python="Or a `vitrail.Bundle`.")]
BundleOnDisk = Annotated[str | Path, _bundle()]
_data = functools.partial(argument, f"Images with labels: {describe_sources()}.", metavar="DATA", cli_type=str)
Data = Annotated[
    "AnyData",
    _data(
        python="Or arrays (images, labels), (paths, labels), a mapping of `train_images` ... `test_labels`, or a"
        " `vitrail.data.dataset.Dataset`."
    ),
]
DataOnDisk = Annotated[str | Path, _data()]
Device = Annotated[
    str | None,
    flag(
        flag_of(RunOptions.__annotations__["device"]).help,
        metavar="D",
        cli_type=str,
        cli_default="auto",
        python="By default auto, or where the model of a `vitrail.Bundle` is.",
    ),
]
EngineName = Annotated[
    str,
    flag(
        f"Engine: {', '.join(ENGINES)} or auto, the fastest by measurement. Those without torch start several"
        " times faster: they run a file that is made on first use, verified against torch and kept beside BUNDLE.",
        metavar="E",
    ),
]
Precision = Annotated[
    str,
    flag(
        f"Precision: {', '.join(PRECISIONS)}, where the engine has it, or auto, the fastest by measurement that"
        " keeps to --tolerance.",
        metavar="P",
    ),
]
Tolerance = Annotated[
    float,
    flag("With --precision auto: the largest share of answers that may differ from float32's.", metavar="T"),
]
Resume = Annotated[
    bool,
    flag(
        "Continue from the newest intact checkpoint of the run, or start if there is none.",
        metavar="[auto]",
        default=False,
        cli_type=Literal["auto"] | None,
        cli_default=None,
        read=bool,
    ),
]
RecordedCommand = Annotated[
    str, python_only("How the result was made, which it records; by default this call.", default="")
]


class RunKeywords(RunOptions, total=False):
    """Keywords that `train`, `finetune` and `faces.train` share."""

    epochs: Annotated[int | None, flag("Number of passes over the training images.", metavar="N")]
    steps: Annotated[int | None, flag("Number of updates.", metavar="N")]
    minutes: Annotated[
        float | None,
        flag("Time limit; the speed is measured at the start, which fixes the number of steps.", metavar="N"),
    ]
    lr: Annotated[float | None, flag("Peak learning rate; default: the recipe's.", metavar="X")]
    batch: Annotated[int | None, flag("Global batch size; default: the recipe's.", metavar="N")]
    per_class: Annotated[int | None, flag("Train on at most N images of each class, chosen by the seed.", metavar="N")]
    patience: Annotated[
        int | None,
        flag(
            "Stop after N evaluations on the held-out images without a better one, and keep the best weights.",
            metavar="N",
        ),
    ]
    settings: Annotated[
        Mapping[str, Any] | Iterable[str],
        flag(
            "Any setting that `vitrail recipes NAME` lists: clip=1 augment.mixup=0.2 model.dropout=0.1 ...",
            metavar="KEY=VALUE",
            default=(),
            cli_name="set",
            cli_type=tuple[str, ...],
            python='In Python as {"clip": 1.0, "augment.mixup": 0.2}, or such texts.',
        ),
    ]
    output: Annotated[
        str | Path | None,
        flag(
            "Folder to write: config, metrics, checkpoints, bundle, report.",
            metavar="RUN",
            cli_type=Path,
            cli_default=REQUIRED,
            python="None: nothing is left but the result.",
        ),
    ]
    resume: Resume
    force: Annotated[bool, flag("Overwrite RUN if it is a run of vitrail.", default=False)]
    callback: Annotated[
        "Callback | None",
        python_only(
            "A function that is called with a `Step` (step, total, epoch, loss, learning_rate, model, held_out) after"
            " every step; it ends the run by returning True."
        ),
    ]
    quiet: Annotated[
        bool | None,
        python_only("Print no notes and progress; by default they are shown in terminals and notebooks only."),
    ]
    command: RecordedCommand


class Parameter(NamedTuple):
    """A parameter of a command."""

    name: str
    type: Any
    """In Python."""
    default: Any
    """In Python; `inspect.Parameter.empty` if it must be given."""
    is_keyword: bool
    flag: Flag


def command(function: Function) -> Function:
    """Make a public function of a command: its signature lists all keywords, its documentation all parameters, and an
    unknown keyword is refused with a suggestion. The attribute `parameters` has all `Parameter`s."""
    parameters = tuple(_parameters_of(function))
    types = {parameter.name: parameter for parameter in parameters}
    keywords = list(types)
    package = "vitrail.faces" if function.__module__.endswith(".faces") else "vitrail"
    public_name = f"{package}.{getattr(function, '__name__', '')}"

    @functools.wraps(function)
    def call(*values: Any, **given: Any) -> Any:
        for name in given:
            if name not in keywords:
                raise _unknown_keyword(public_name, name, given[name], keywords)
        for parameter, value in (
            *zip(parameters, values, strict=False),
            *((types[name], given[name]) for name in given),
        ):
            _check_type(parameter, value)
        if "command" in keywords and not given.get("command"):
            given["command"] = _as_call(public_name, parameters, {**dict(zip(keywords, values, strict=False)), **given})
        return function(*values, **given)

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    plain = [
        inspect.Parameter(
            one.name,
            kinds[one.is_keyword],
            default=one.default,
            annotation=getattr(one.type, "__forward_arg__", one.type),
        )
        for one in parameters
    ]
    returned = function.__annotations__.get("return", inspect.Signature.empty)
    call.__doc__ = _documentation(function.__doc__ or "", parameters)
    call.__dict__.update(__signature__=inspect.Signature(plain, return_annotation=returned), parameters=parameters)
    return cast(Function, call)


def _check_type(parameter: Parameter, value: object) -> None:
    """Refuse what is no path, text, truth value or choice where the parameter is one. Other types, and texts that must
    be given, are checked where they are used."""
    allowed = set(get_args(parameter.type) or (parameter.type,))
    if value is parameter.default or (value is None and type(None) in allowed):
        return
    allowed.discard(type(None))
    if allowed == {str, Path}:
        rule, is_right = "a path", isinstance(value, str | os.PathLike)
    elif allowed == {str} and parameter.default is not inspect.Parameter.empty:
        rule, is_right = "a text", isinstance(value, str)
    elif allowed == {bool}:
        rule, is_right = "True or False", isinstance(value, bool)
    elif len(allowed) == 1 and get_origin(choices := allowed.pop()) is Literal:
        rule, is_right = f"one of {', '.join(map(str, get_args(choices)))}", value in get_args(choices)
    else:
        return
    if not is_right:
        raise UsageError(f"{sentence_case(parameter.name)} must be {rule}, got {value!r}.")


def _parameters_of(function: Callable[..., Any]) -> Iterator[Parameter]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            is_keyword = parameter.kind is parameter.KEYWORD_ONLY
            yield _parameter(parameter.name, parameter.annotation, parameter.default, is_keyword=is_keyword)
            continue
        (options,) = get_args(parameter.annotation)  # of Unpack[...]
        # Those of a base class come first in a TypedDict.
        for name, annotation in sorted(options.__annotations__.items(), key=lambda item: item[0] in _OF_ANY_RUN):
            yield _parameter(name, annotation, flag_of(annotation).default, is_keyword=True)


_OF_ANY_RUN = RunOptions.__annotations__


def _parameter(name: str, annotation: Any, default: Any, *, is_keyword: bool) -> Parameter:
    return Parameter(name, annotation.__origin__, default, is_keyword, flag_of(annotation))


def _documentation(text: str, parameters: Iterable[Parameter]) -> str:
    """The docstring with all parameters in front of its example."""
    about, *example = re.split(r"\n\n(?=\s*>>>)", inspect.cleandoc(text), maxsplit=1)
    rows = [f"    {one.name}\n        {' '.join(filter(None, (one.flag.help, one.flag.python)))}" for one in parameters]
    return "\n".join([about, "", "Parameters:", "", *rows, "", *example, ""])


def _unknown_keyword(function: str, name: str, value: object, known: list[str]) -> UsageError:
    elsewhere, settings = suggest_our_name(name, known), {field.name for field in dataclasses.fields(Recipe)}
    setting = suggest_our_name(name, settings).get(name, name)
    if "settings" in known and setting in settings and not elsewhere:
        near = f" It is a setting of recipes: settings={{{setting!r}: {value!r}}}."
    else:
        near = did_you_mean(name, known, elsewhere)
    return UsageError(f"Keyword of {function.rpartition('.')[2]} must be one that help() lists, got {name!r}.{near}")


def _as_call(name: str, parameters: Iterable[Parameter], given: Mapping[str, Any]) -> str:
    """The call of a function, for the record: its arguments in words, without those that are left at their defaults."""
    words = []
    for parameter in parameters:
        if parameter.name in given and (value := given[parameter.name]) is not parameter.default:
            is_required = parameter.default is inspect.Parameter.empty
            words.append(_in_words(value) if is_required else f"{parameter.name}={_in_words(value)}")
    return f"{name}({', '.join(words)})"


def _in_words(value: object) -> str:
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, str | int | float | None):
        return repr(value)
    if isinstance(value, dict) and all(isinstance(one, str | int | float | None) for one in value.values()):
        return repr(value)
    return f"<{getattr(value, '__name__', type(value).__name__)}>"
