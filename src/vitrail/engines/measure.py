"""Speed of each engine on this machine."""

import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import repeat

from vitrail.configs.engines import ENGINES
from vitrail.console import say
from vitrail.data.prefetch import prefetch
from vitrail.engines.base import batch_for
from vitrail.engines.choose import Speeds
from vitrail.engines.export import sample
from vitrail.weights.parts import read_parts

_ROUNDS, _ENOUGH = 5, 3.0  # rounds at most, and seconds after which no further one begins


def measure(path: str, names: list[str], threads: int) -> Speeds:
    """For each engine the seconds to start and the seconds per image, with `threads` threads in parallel."""
    say("measuring which engine is faster here (once)")
    engines = {name: ENGINES[name].open(path) for name in names}
    parts = read_parts(path, weights=False)
    pixels = sample(parts.preprocess, batch_for(parts.config))
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    began = time.perf_counter()
    for number in range(1 + _ROUNDS):
        for name, engine in engines.items():
            with engine.running(1) as run:
                start = time.perf_counter()
                for _ in prefetch(repeat(partial(run, pixels), threads), threads, ahead=threads):
                    pass
                seconds[name].append((time.perf_counter() - start) / (threads * len(pixels)))
        if number and time.perf_counter() - began > _ENOUGH:
            break
    speeds: Speeds = {
        # The first round is for warming up.
        name: {"start": _start(name, path), "picture": statistics.median(seconds[name][1:])}
        for name in engines
    }
    words = ", ".join(
        f"{name} {1 / speed['picture']:.1f} images/s after {speed['start']:.1f} s" for name, speed in speeds.items()
    )
    say(words)
    return speeds


def _start(name: str, path: str) -> float:
    """Seconds to start, measured in a new process, because this one may have loaded everything already."""
    words = [sys.executable, "-c", ENGINES[name].start, str(ENGINES[name].prepare(path))]
    start = time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    return time.perf_counter() - start
