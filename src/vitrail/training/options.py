"""Options of a run that are not part of its recipe: seed, threads, device, cache, checkpoints."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypedDict, TypeVar, Unpack

from vitrail.core.flags import RECORDS, SPEED, flag, flag_of
from vitrail.core.settings import Bounds, Settings

_Class = TypeVar("_Class", bound=type)


class RunOptions(TypedDict, total=False):
    """Options of a run: keyword arguments of the functions that train, and flags of their commands.

    The seed changes the result, and the precision changes it slightly. Threads, device and compile change its last
    bits. The other options do not change it.
    """

    seed: Annotated[
        int,
        flag("Random seed. The same seed, machine and threads give the same weights.", metavar="S", default=0),
        Bounds(0, 2**63 - 1),
    ]
    workers: Annotated[int, flag("Threads that prepare images.", metavar="N", default=2, group=SPEED), Bounds(0, 256)]
    threads: Annotated[
        int | None,
        flag(
            "Threads that compute; the default is chosen by torch. A resumed run keeps its number of threads.",
            metavar="N",
            group=SPEED,
        ),
        Bounds(1, 4096),
    ]
    device: Annotated[
        str,
        flag(
            "Device: cpu, cuda, xpu, mps, ...; auto uses an accelerator if torch finds one, otherwise the CPU.",
            metavar="D",
            default="auto",
            group=SPEED,
        ),
    ]
    precision: Annotated[
        Literal["float32", "bfloat16"],
        flag(
            "float32 or bfloat16. bfloat16 computes in 16 bits where that is safe; at the start, the run prints"
            " whether this is faster on this machine.",
            default="float32",
            group=SPEED,
        ),
    ]
    amp: Annotated[bool, flag("Same as --precision bfloat16.", default=False, group=SPEED)]
    compile: Annotated[
        bool,
        flag(
            "Compile the model first. This takes about a minute and makes steps faster on some machines.",
            default=False,
            group=SPEED,
        ),
    ]
    cache: Annotated[
        str | None,
        flag("Folder for decoded images, so that later epochs do not decode files again.", metavar="DIR", group=SPEED),
    ]
    cache_gigabytes: Annotated[
        float, flag("Maximum size of the cache in GB.", metavar="N", default=10.0, group=SPEED), Bounds(0, below=1e9)
    ]
    checkpoint_seconds: Annotated[
        float,
        flag(
            "Seconds between checkpoints. A checkpoint is also written at the end of every epoch.",
            metavar="N",
            default=30.0,
            group=RECORDS,
        ),
        Bounds(0, below=1e9),
    ]
    snapshots: Annotated[
        int,
        flag(
            "Save the model before the first step and at this many log-spaced steps, as bundles in RUN/snapshots.",
            metavar="N",
            default=0,
            group=RECORDS,
        ),
        Bounds(0, 10_000),
    ]
    gradients: Annotated[bool, flag("Log the gradient norm of each layer with the loss.", default=False, group=RECORDS)]
    keep: Annotated[
        int,
        flag(
            "Number of newest checkpoints to keep, in addition to the best one.", metavar="N", default=2, group=RECORDS
        ),
        Bounds(1, 1_000_000),
    ]


def _add_option_fields(settings: _Class) -> _Class:
    """Class decorator that adds an annotated field with a default for each key of `RunOptions`."""
    for name, annotation in RunOptions.__annotations__.items():
        settings.__annotations__[name] = annotation
        setattr(settings, name, flag_of(annotation).default)
    return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
@_add_option_fields
class Options(Settings):
    """All options of a run: the validated keys of `RunOptions` with their defaults."""

    title: ClassVar[str] = "Options"

    if TYPE_CHECKING:  # for type checkers, because the fields are added by the decorator

        def __init__(self, **options: Unpack[RunOptions]) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        super().__post_init__()
        # Checkpoints and config.toml files store the precision as `amp`.
        object.__setattr__(self, "precision", "bfloat16" if self.amp else self.precision)
        object.__setattr__(self, "amp", self.precision == "bfloat16")
