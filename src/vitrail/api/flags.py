"""Flags that several commands share, and groups of commands."""

import dataclasses
import functools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import tyro

from vitrail.core.errors import UsageError
from vitrail.core.settings import Settings
from vitrail.data.sources.registry import describe_sources
from vitrail.inference.registry import ENGINES, PRECISIONS
from vitrail.training.options import Options
from vitrail.training.recipe import Recipe, adjust_recipe

given_words: ContextVar[tuple[str, ...]] = ContextVar("given_words", default=())
"""Arguments of the running command, which a run records."""


def _show_default(value: str) -> str:
    """What --help says of a default; nothing if the flag is then simply absent."""
    return "" if value in ("None", "") else f"(default: {value})"


arg = functools.partial(tyro.conf.arg, help_behavior_hint=_show_default)
Json = Annotated[bool, arg(help="Print one JSON document instead of a table.")]

BundlePath = Annotated[
    str,
    tyro.conf.Positional,
    arg(metavar="BUNDLE", help="A folder written by train, finetune or convert, or the embedded bundle fashion."),
]
Data = Annotated[
    str,
    tyro.conf.Positional,
    arg(metavar="DATA", help=f"Images with labels: {describe_sources()}."),
]


Resume = Annotated[
    Literal["auto"] | None,
    arg(metavar="[auto]", help="Continue from the newest intact checkpoint of the run, or start if there is none."),
]
Device = Annotated[str, arg(metavar="D", help=Options.meanings()["device"])]

EngineName = Annotated[
    str,
    arg(
        metavar="E",
        help=f"Engine: {', '.join(ENGINES)} or auto, the fastest by measurement. Those without torch start several"
        " times faster: they run a file that is made on first use, verified against torch and kept beside BUNDLE.",
    ),
]
Precision = Annotated[
    str,
    arg(
        metavar="P",
        help=f"Precision: {', '.join(PRECISIONS)}, where the engine has it, or auto, the fastest by measurement that"
        " keeps to --tolerance.",
    ),
]
Tolerance = Annotated[
    float,
    arg(metavar="T", help="With --precision auto: the largest share of answers that may differ from float32's."),
]


def _as_flags(kind: type[Settings], metavars: dict[str, str]) -> Any:
    """A dataclass of flags with the names, types, defaults and docstrings of some settings. Values are checked by the
    settings later."""
    hints, meanings, flags = get_type_hints(kind), kind.meanings(), []
    for field in dataclasses.fields(kind):
        has_words = hints[field.name] is bool or get_origin(hints[field.name]) is Literal
        metavar = None if has_words else metavars.get(field.name, "N")
        about = arg(metavar=metavar, help=meanings[field.name])
        flags.append((field.name, Annotated[hints[field.name], about], field.default))  # ty: ignore[invalid-type-form]
    return dataclasses.make_dataclass(f"{kind.__name__}Flags", flags, frozen=True)


OptionFlags = _as_flags(Options, {"seed": "S", "device": "D", "cache": "DIR"})


@dataclasses.dataclass(frozen=True)
class Running:
    """Flags that train and finetune share."""

    epochs: Annotated[int | None, arg(metavar="N", help="Number of passes over the training images.")] = None
    steps: Annotated[int | None, arg(metavar="N", help="Number of updates.")] = None
    minutes: Annotated[
        float | None,
        arg(metavar="N", help="Time limit; the speed is measured at the start, which fixes the number of steps."),
    ] = None
    lr: Annotated[float | None, arg(metavar="X", help="Peak learning rate; default: the recipe's.")] = None
    batch: Annotated[int | None, arg(metavar="N", help="Global batch size; default: the recipe's.")] = None
    per_class: Annotated[
        int | None, arg(metavar="N", help="Train on at most N images of each class, chosen by the seed.")
    ] = None
    patience: Annotated[
        int | None,
        arg(
            metavar="N",
            help="Stop after N evaluations on the held-out images without a better one, and keep the best weights.",
        ),
    ] = None
    set: Annotated[
        tuple[str, ...],
        arg(
            metavar="KEY=VALUE",
            help="Any setting that `vitrail recipes NAME` lists: clip=1 augment.mixup=0.2 model.dropout=0.1 ...",
        ),
    ] = ()
    resume: Resume = None
    force: Annotated[bool, arg(help="Overwrite RUN if it is a run of vitrail.")] = False
    options: Annotated[Any, arg(name="", constructor=OptionFlags)] = dataclasses.field(default_factory=OptionFlags)

    def adjust(self, recipe: Recipe) -> Recipe:
        """The recipe with what the flags change."""
        given = {name: getattr(self, name) for name in ("batch", "per_class", "patience")}
        lengths = {name: getattr(self, name) for name in ("epochs", "steps", "minutes")}
        return adjust_recipe(recipe, {"learning_rate": self.lr, **given}, self.set, **lengths)

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of `vitrail.train` and `vitrail.finetune`. Only they are quiet where nobody watches."""
        same = {name: getattr(self, name) for name in _AS_KEYWORDS}
        return {
            **same,
            **dataclasses.asdict(self.options),
            "settings": self.set,
            "resume": self.resume == "auto",
            "quiet": False,
            "command": given_command(),
        }


_AS_KEYWORDS = ("epochs", "steps", "minutes", "lr", "batch", "per_class", "patience", "force")


Flags = Annotated[Running, arg(name="")]
AS_USUAL = Running()


class Group(NamedTuple):
    """Commands that belong together, as `vitrail faces enroll` and `vitrail faces identify` do."""

    about: str
    """What --help says of them."""
    commands: dict[str, Callable[..., None]]


def given_command() -> str:
    """The running command as the user typed it."""
    return shlex.join(["vitrail", *given_words.get()])


def lines_of_stdin() -> Iterator[str]:
    """The names that - stands for; stdin is read only if they are asked for."""
    return (os.fsdecode(line).rstrip("\r\n") for line in getattr(sys.stdin, "buffer", ()))


def parse_resolution(text: str) -> tuple[int, int]:
    """Height and width from `384` or `224x384`."""
    sides = re.fullmatch(r"(\d{1,99})(?:[x,](\d{1,99}))?", text)
    if not sides:
        raise UsageError(f"Resolution must be a number such as 384 or height x width such as 224x384, got {text!r}.")
    return int(sides[1]), int(sides[2] or sides[1])
