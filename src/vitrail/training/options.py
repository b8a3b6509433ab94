"""Options of a run that are not part of its recipe: seed, threads, device, cache, checkpoints."""

import dataclasses
from typing import ClassVar, Literal

from vitrail.core.settings import Settings, check_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The seed changes the result, and so, a little, does the precision; threads, device and compile change its last
    bits; the rest changes nothing."""

    title: ClassVar[str] = "Options"

    seed: int = 0
    """The same seed, machine and threads give the same weights."""
    workers: int = 2
    """Threads that prepare images."""
    threads: int | None = None
    """Threads that compute; by default torch's choice. A resumed run keeps the number it began with."""
    device: str = "auto"
    """cpu, cuda, xpu, mps, ...; auto takes the accelerator that torch finds, otherwise the CPU."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes in 16 bits where that is safe; the start of the run says what it gains or costs here."""
    amp: bool = False
    """The same as --precision bfloat16."""
    compile: bool = False
    """Compile the model first: a minute or so, then faster steps on some machines."""
    cache: str | None = None
    """Folder for decoded images, so that later epochs decode no JPEG files."""
    cache_gigabytes: float = 10.0
    """Maximum size of the cache."""
    checkpoint_seconds: float = 30.0
    """Seconds between checkpoints; one is also written at the end of an epoch, if that comes first."""
    snapshots: int = 0
    """Keep the model at this many log-spaced steps, and before the first, as bundles in RUN/snapshots."""
    gradients: bool = False
    """Log the norm of each layer's gradient with the loss."""
    keep: int = 2
    """Number of newest checkpoints to keep, besides the best."""

    def __post_init__(self) -> None:
        self._check_choices(("precision",))
        self._check_flags(("amp",))
        # Checkpoints and configurations of runs know it as `amp`.
        object.__setattr__(self, "precision", "bfloat16" if self.amp else self.precision)
        object.__setattr__(self, "amp", self.precision == "bfloat16")
        self._set_integer("seed", low=0, high=2**63 - 1)
        self._set_integer("workers", low=0, high=256)
        self._set_integer("keep", low=1, high=1_000_000)
        self._set_integer("snapshots", low=0, high=10_000)
        check_number("checkpoint_seconds", self.checkpoint_seconds, low=0, below=1e9)
        check_number("cache_gigabytes", self.cache_gigabytes, low=0, below=1e9)
        if self.threads is not None:
            self._set_integer("threads", low=1, high=4096)
