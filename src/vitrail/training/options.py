"""Options of a run that are not part of its recipe: seed, threads, device, cache, checkpoints."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypedDict, TypeVar, Unpack

from vitrail.core.flags import flag, flag_of
from vitrail.core.settings import Bounds, Settings

_Class = TypeVar("_Class", bound=type)


class RunOptions(TypedDict, total=False):
    """Each option, as a keyword of the functions that train and as a flag of their commands. The seed changes the
    result, and so, a little, does the precision; threads, device and compile change its last bits; the rest changes
    nothing."""

    seed: Annotated[
        int,
        flag("The same seed, machine and threads give the same weights.", metavar="S", default=0),
        Bounds(0, 2**63 - 1),
    ]
    workers: Annotated[int, flag("Threads that prepare images.", metavar="N", default=2), Bounds(0, 256)]
    threads: Annotated[
        int | None,
        flag(
            "Threads that compute; by default torch's choice. A resumed run keeps the number it began with.",
            metavar="N",
        ),
        Bounds(1, 4096),
    ]
    device: Annotated[
        str,
        flag(
            "cpu, cuda, xpu, mps, ...; auto takes the accelerator that torch finds, otherwise the CPU.",
            metavar="D",
            default="auto",
        ),
    ]
    precision: Annotated[
        Literal["float32", "bfloat16"],
        flag(
            "float32, bfloat16. bfloat16 computes in 16 bits where that is safe; the start of the run says what it"
            " gains or costs here.",
            default="float32",
        ),
    ]
    amp: Annotated[bool, flag("The same as --precision bfloat16.", default=False)]
    compile: Annotated[
        bool, flag("Compile the model first: a minute or so, then faster steps on some machines.", default=False)
    ]
    cache: Annotated[
        str | None, flag("Folder for decoded images, so that later epochs decode no JPEG files.", metavar="DIR")
    ]
    cache_gigabytes: Annotated[
        float, flag("Maximum size of the cache.", metavar="N", default=10.0), Bounds(0, below=1e9)
    ]
    checkpoint_seconds: Annotated[
        float,
        flag(
            "Seconds between checkpoints; one is also written at the end of an epoch, if that comes first.",
            metavar="N",
            default=30.0,
        ),
        Bounds(0, below=1e9),
    ]
    snapshots: Annotated[
        int,
        flag(
            "Keep the model at this many log-spaced steps, and before the first, as bundles in RUN/snapshots.",
            metavar="N",
            default=0,
        ),
        Bounds(0, 10_000),
    ]
    gradients: Annotated[bool, flag("Log the norm of each layer's gradient with the loss.", default=False)]
    keep: Annotated[
        int,
        flag("Number of newest checkpoints to keep, besides the best.", metavar="N", default=2),
        Bounds(1, 1_000_000),
    ]


def _fields_of_options(settings: _Class) -> _Class:
    """Give a class a field for each key of `RunOptions`."""
    for name, annotation in RunOptions.__annotations__.items():
        settings.__annotations__[name] = annotation
        setattr(settings, name, flag_of(annotation).default)
    return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
@_fields_of_options
class Options(Settings):
    """All options of a run: the keys of `RunOptions`, checked, with their defaults."""

    title: ClassVar[str] = "Options"

    if TYPE_CHECKING:  # the fields of the dataclass

        def __init__(self, **options: Unpack[RunOptions]) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        # Checkpoints and configurations of runs know it as `amp`.
        object.__setattr__(self, "precision", "bfloat16" if self.amp else self.precision)
        object.__setattr__(self, "amp", self.precision == "bfloat16")
