"""Parameters that several commands share, and the decorator `command`.

A command is a function whose annotated parameters declare its flags, its `--help` and its documentation (`core.flags`).
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
from vitrail.core.flags import REQUIRED, SPEED, UNSET, Flag, argument, flag, flag_of, python_only
from vitrail.core.other_tools import suggest_our_name
from vitrail.core.settings import as_integer, sentence_case
from vitrail.inference.registry import ENGINES, PRECISIONS
from vitrail.training.options import RunOptions
from vitrail.training.recipe import Recipe

if TYPE_CHECKING:
    from vitrail.bundles.bundle import Bundle
    from vitrail.data.sources.registry import AnyData
    from vitrail.training.callback import Callback

Function = TypeVar("Function", bound=Callable[..., Any])


def parse_resolution(text: str) -> tuple[int, int]:
    """Return height and width from the text `384` or `224x384`. Raise UsageError for any other text."""
    sides = re.fullmatch(r"(\d{1,99})(?:[x,](\d{1,99}))?", text)
    if not sides:
        raise UsageError(f"Resolution must be a number such as 384 or height x width such as 224x384, got {text!r}.")
    return int(sides[1]), int(sides[2] or sides[1])


def as_pair(resolution: object) -> tuple[int, int]:
    """Return height and width from an integer or a pair of integers. Raise UsageError for any other value."""
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
    "A folder written by train, finetune or convert, or `fashion`, the embedded bundle.",
    metavar="BUNDLE",
    cli_type=str,
)
BundlePath = Annotated["str | Path | Bundle", _bundle(python="Or a `vitrail.Bundle`.")]
BundleOnDisk = Annotated[str | Path, _bundle()]
_data = functools.partial(
    argument,
    "Images with labels: a folder with one folder per class, a .zip or .tar of such a folder, a .csv or .npz file, or a"
    " name such as digits. `vitrail help data` lists all forms.",
    metavar="DATA",
    cli_type=str,
)
Data = Annotated[
    "AnyData",
    _data(
        python="Or arrays (images, labels), (paths, labels), a mapping of `train_images` ... `test_labels`, or a"
        " `vitrail.data.dataset.Dataset`."
    ),
]
DataOnDisk = Annotated[str | Path, _data()]
Corrections = Annotated[
    str | Path | None,
    file_flag(
        "A .csv file of file,label whose labels replace those of DATA, as pages of `evaluate` and `predict` save it."
        " An empty label leaves the image out."
    ),
]
Device = Annotated[
    str | None,
    flag(
        flag_of(RunOptions.__annotations__["device"]).help,
        metavar="D",
        group=SPEED,
        cli_type=str,
        cli_default="auto",
        python="By default auto, or the device of a `vitrail.Bundle`'s model.",
    ),
]
EngineName = Annotated[
    str,
    flag(
        f"Engine: {', '.join(ENGINES)}, or auto, the fastest by measurement. onnx and openvino start several times"
        " faster than torch. They run a file that is made on first use, verified against torch and stored next to"
        " BUNDLE.",
        metavar="E",
    ),
]
Precision = Annotated[
    str,
    flag(
        f"Precision: {', '.join(PRECISIONS)} (if the engine supports it), or auto, the fastest by measurement within"
        " --tolerance.",
        metavar="P",
        group=SPEED,
    ),
]
Tolerance = Annotated[
    float,
    flag(
        "With --precision auto: the largest share of predictions that may differ from those of float32.",
        metavar="T",
        group=SPEED,
    ),
]
Resume = Annotated[
    bool,
    flag(
        "Continue from the newest intact checkpoint in the output folder, or start if there is none.",
        metavar="[auto]",
        default=False,
        cli_type=Literal["auto"] | None,
        cli_default=None,
        read=bool,
    ),
]
Licence = Annotated[
    str | None,
    flag(
        "Licence of the weights, such as cc-by-4.0, for the bundle and its card. Default: that of the data or of the"
        " source, if known.",
        metavar="TEXT",
    ),
]
RecordedCommand = Annotated[str, python_only("Command to record in the result; by default this call.", default="")]


class RunKeywords(RunOptions, total=False):
    """Keywords that `train`, `finetune` and `faces.train` share."""

    epochs: Annotated[int | None, flag("Number of passes over the training images.", metavar="N")]
    steps: Annotated[int | None, flag("Number of updates.", metavar="N")]
    minutes: Annotated[
        float | None,
        flag("Time limit. The number of steps is fixed at the start, from the measured speed.", metavar="N"),
    ]
    lr: Annotated[float | None, flag("Peak learning rate; default: as in the recipe.", metavar="X")]
    batch: Annotated[int | None, flag("Global batch size; default: as in the recipe.", metavar="N")]
    corrections: Corrections
    per_class: Annotated[int | None, flag("Train on at most N images of each class, chosen by the seed.", metavar="N")]
    patience: Annotated[
        int | None,
        flag(
            "Stop after N evaluations on the held-out images without an improvement, and keep the best weights.",
            metavar="N",
        ),
    ]
    settings: Annotated[
        Mapping[str, Any] | Iterable[str],
        flag(
            "Change any setting that `vitrail recipes NAME` lists, such as clip=1 augment.mixup=0.2 model.dropout=0.1.",
            metavar="KEY=VALUE",
            default=(),
            cli_name="set",
            cli_type=tuple[str, ...],
            python='In Python as {"clip": 1.0, "augment.mixup": 0.2}, or as texts.',
        ),
    ]
    output: Annotated[
        str | Path | None,
        flag(
            "Folder to write: configuration, metrics, checkpoints, bundle and report.",
            metavar="RUN",
            cli_type=Path,
            cli_default=REQUIRED,
            python="None: no files are kept.",
        ),
    ]
    licence: Licence
    resume: Resume
    force: Annotated[bool, flag("Overwrite RUN if vitrail wrote it.", default=False)]
    callback: Annotated[
        "Callback | None",
        python_only(
            "Function that is called with a `Step` (step, total, epoch, loss, learning_rate, model, held_out) after"
            " every step. If it returns True, the run ends."
        ),
    ]
    quiet: Annotated[
        bool | None,
        python_only("Do not print notes and progress. By default they are printed in terminals and notebooks only."),
    ]
    command: RecordedCommand


class Parameter(NamedTuple):
    """A parameter of a command."""

    name: str
    type: Any
    """Type in Python."""
    default: Any
    """Default in Python; `inspect.Parameter.empty` if the parameter is required."""
    is_keyword: bool
    flag: Flag
    cli_type: Any
    """Type on the command line."""
    cli_default: Any
    """Default on the command line; `inspect.Parameter.empty` if the parameter is required."""

    @property
    def is_required_in_cli(self) -> bool:
        """Whether the command line must have the parameter."""
        return self.cli_default is inspect.Parameter.empty


def command(function: Function) -> Function:
    """Decorate the public function of a command.

    The returned function lists all keywords in its signature and all parameters in its docstring. It raises UsageError
    for an unknown keyword, with a suggestion. Its attribute `parameters` has the `Parameter`s.
    """
    parameters = tuple(_declared_parameters(function))
    by_name = {parameter.name: parameter for parameter in parameters}
    names = list(by_name)
    package = "vitrail.faces" if function.__module__.endswith(".faces") else "vitrail"
    public_name = f"{package}.{getattr(function, '__name__', '')}"

    @functools.wraps(function)
    def call(*values: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in by_name:
                raise _unknown_keyword_error(public_name, name, keywords[name], names)
        arguments = {**dict(zip(names, values, strict=False)), **keywords}
        for name, value in arguments.items():
            _check_type(by_name[name], value)
        if "command" in by_name and not keywords.get("command"):
            keywords["command"] = _format_call(public_name, parameters, arguments)
        return function(*values, **keywords)

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    signature = [
        inspect.Parameter(
            parameter.name,
            kinds[parameter.is_keyword],
            default=parameter.default,
            annotation=getattr(parameter.type, "__forward_arg__", parameter.type),
        )
        for parameter in parameters
    ]
    return_type = function.__annotations__.get("return", inspect.Signature.empty)
    call.__doc__ = _format_documentation(function.__doc__ or "", parameters)
    call.__dict__.update(
        __signature__=inspect.Signature(signature, return_annotation=return_type), parameters=parameters
    )
    return cast(Function, call)


def _check_type(parameter: Parameter, value: object) -> None:
    """Raise UsageError if a path, text, boolean or choice of a command has a value of another type.

    Other types, and required texts, are checked where they are used.
    """
    types = set(get_args(parameter.type) or (parameter.type,))
    if value is parameter.default or (value is None and type(None) in types):
        return
    types.discard(type(None))
    if types == {str, Path}:
        rule, is_valid = "a path", isinstance(value, str | os.PathLike)
    elif types == {str} and parameter.default is not inspect.Parameter.empty:
        rule, is_valid = "a text", isinstance(value, str)
    elif types == {bool}:
        rule, is_valid = "True or False", isinstance(value, bool)
    elif len(types) == 1 and get_origin(choices := types.pop()) is Literal:
        rule, is_valid = f"one of {', '.join(map(str, get_args(choices)))}", value in get_args(choices)
    else:
        return
    if not is_valid:
        raise UsageError(f"{sentence_case(parameter.name)} must be {rule}, got {value!r}.")


def _declared_parameters(function: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the parameters of a function, with the keys of its `Unpack[...]` in their place."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            is_keyword = parameter.kind is parameter.KEYWORD_ONLY
            yield _make_parameter(parameter.name, parameter.annotation, parameter.default, is_keyword=is_keyword)
            continue
        (options,) = get_args(parameter.annotation)  # of Unpack[...]
        # In a TypedDict the keys of the base class come first; the help lists them last.
        for name, annotation in sorted(options.__annotations__.items(), key=lambda item: item[0] in _RUN_OPTIONS):
            yield _make_parameter(name, annotation, flag_of(annotation).default, is_keyword=True)


_RUN_OPTIONS = RunOptions.__annotations__


def _make_parameter(name: str, annotation: Any, default: Any, *, is_keyword: bool) -> Parameter:
    metadata, python_type = flag_of(annotation), annotation.__origin__
    cli_type = python_type if metadata.cli_type is None else metadata.cli_type
    cli_default = default if metadata.cli_default is UNSET else metadata.cli_default
    cli_default = inspect.Parameter.empty if cli_default is REQUIRED else cli_default
    return Parameter(name, python_type, default, is_keyword, metadata, cli_type, cli_default)


def _format_documentation(text: str, parameters: Iterable[Parameter]) -> str:
    """Return a docstring with all parameters inserted before its example."""
    about, *example = re.split(r"\n\n(?=\s*>>>)", inspect.cleandoc(text), maxsplit=1)
    rows = [
        f"    {parameter.name}\n        {' '.join(filter(None, (parameter.flag.help, parameter.flag.python)))}"
        for parameter in parameters
    ]
    return "\n".join([about, "", "Parameters:", "", *rows, "", *example, ""])


def _unknown_keyword_error(function: str, name: str, value: object, names: list[str]) -> UsageError:
    """Return the error for a keyword that the function of a command lacks, with a suggestion."""
    aliases, settings = suggest_our_name(name, names), {field.name for field in dataclasses.fields(Recipe)}
    setting = suggest_our_name(name, settings).get(name, name)
    if "settings" in names and setting in settings and not aliases:
        suggestion = f" It is a setting of recipes: settings={{{setting!r}: {value!r}}}."
    else:
        suggestion = did_you_mean(name, names, aliases)
    public_name = function.rpartition(".")[2]
    return UsageError(f"Keyword of {public_name} must be one that help() lists, got {name!r}.{suggestion}")


def _format_call(name: str, parameters: Iterable[Parameter], values: Mapping[str, Any]) -> str:
    """Return the source text of a call, for the record of its result. Defaults are omitted."""
    arguments = []
    for parameter in parameters:
        if parameter.name in values and (value := values[parameter.name]) is not parameter.default:
            is_required = parameter.default is inspect.Parameter.empty
            arguments.append(_format_value(value) if is_required else f"{parameter.name}={_format_value(value)}")
    return f"{name}({', '.join(arguments)})"


def _format_value(value: object) -> str:
    """Return the source text of a number, text, path or dict; for any other value its name in angle brackets."""
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, str | int | float | None):
        return repr(value)
    if isinstance(value, dict) and all(isinstance(item, str | int | float | None) for item in value.values()):
        return repr(value)
    return f"<{getattr(value, '__name__', type(value).__name__)}>"
