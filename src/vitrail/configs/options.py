"""Options of a run that are not part of its recipe: seed, threads, device, cache, checkpoints."""

import dataclasses
from typing import ClassVar

from vitrail.settings import Settings, check_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """The seed changes the result; threads, device, amp and compile change its last bits; the rest changes nothing."""

    title: ClassVar[str] = "Options"

    seed: int = 0
    """The same seed, machine and threads give the same weights."""
    workers: int = 2
    """Threads that prepare images."""
    threads: int | None = None
    """Threads that compute; by default torch's choice. A resumed run keeps the number it began with."""
    device: str = "auto"
    """cpu, cuda, mps, ...; auto takes CUDA if there is any."""
    amp: bool = False
    """Compute in bfloat16 where that is safe. Slow on CPUs without bfloat16."""
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
        self._set_integer("seed", low=0, high=2**63 - 1)
        self._set_integer("workers", low=0, high=256)
        self._set_integer("keep", low=1, high=1_000_000)
        self._set_integer("snapshots", low=0, high=10_000)
        check_number("checkpoint_seconds", self.checkpoint_seconds, low=0, below=1e9)
        check_number("cache_gigabytes", self.cache_gigabytes, low=0, below=1e9)
        if self.threads is not None:
            self._set_integer("threads", low=1, high=4096)
