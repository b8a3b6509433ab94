"""Speed of engines on this machine."""

import contextlib
import io
import resource
import subprocess
import sys
import time
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np

from vitrail.core.errors import VitrailError
from vitrail.core.terminal import say
from vitrail.data.prefetch import prefetch
from vitrail.inference.benchmark_store import Speed, Workload
from vitrail.inference.engine import Engine, EngineChoice, Run
from vitrail.inference.proof import crop_embedded_images
from vitrail.inference.registry import ENGINES

_ROUNDS, _ENOUGH = 5, 3.0  # rounds at most, and seconds after which no further one begins
_REST = 0.05  # seconds before a measurement: threads of ONNX Runtime spin for a while after a call
_HOPELESS = 10  # times slower than the fastest for one image: it is not measured any further

_FIRST = "import sys; from vitrail.inference.measure import answer_first; answer_first(*sys.argv[1:])"


def measure_speeds(path: str, choices: list[EngineChoice], load: Workload) -> dict[EngineChoice, Speed]:
    """The speed of each engine choice, measured in turn, so that a machine that slows down slows all of them."""
    say(f"measuring {', '.join(map(str, choices))} on this machine (once)")
    folders = {choice: ENGINES[choice.engine].prepare(path, choice.precision) for choice in choices}
    engines = {choice: ENGINES[choice.engine].open(path, load.device, choice.precision) for choice in choices}
    seconds = _race(engines, load)
    return {choice: Speed(seconds[choice], *_start(path, choice, load), _size(folders[choice])) for choice in choices}


def _race(engines: dict[EngineChoice, Engine], load: Workload) -> dict[EngineChoice, float]:
    """Seconds per image of each engine choice in its fastest round, which other programs disturbed least. The first
    round is for warming up."""
    preprocess = next(iter(engines.values())).info.preprocess
    pixels = np.resize(some := crop_embedded_images(preprocess, load.batch), (load.batch, *some.shape[1:]))
    with contextlib.ExitStack() as stack:
        runs = {
            choice: stack.enter_context(engine.running(load.threads, load.callers))
            for choice, engine in engines.items()
        }
        alone = {choice: _seconds(run, pixels[:1], 1) for choice, run in runs.items()}
        racing = [choice for choice in runs if alone[choice] <= _HOPELESS * min(alone.values())]
        rounds: dict[EngineChoice, list[float]] = {choice: [] for choice in racing}
        began = time.perf_counter()
        for number in range(1 + _ROUNDS):
            for choice in racing:
                rounds[choice].append(_seconds(runs[choice], pixels, load.callers))
            if number and time.perf_counter() - began > _ENOUGH * len(racing):
                break
    return alone | {choice: min(values[1:]) for choice, values in rounds.items()}


def _seconds(run: Run, pixels: np.ndarray, callers: int) -> float:
    """Seconds per image, when the threads of other engines have come to rest and an uncounted image is computed."""
    time.sleep(_REST)
    run(pixels[:1])
    start = time.perf_counter()
    for _ in prefetch(repeat(partial(run, pixels), callers), callers, ahead=callers):
        pass
    return (time.perf_counter() - start) / (callers * len(pixels))


def _start(path: str, choice: EngineChoice, load: Workload) -> tuple[float, int]:
    """Seconds of a new process to its first answer, because this one may have loaded everything already; and the bytes
    that it holds at most."""
    numbers = str(load.batch), str(load.callers * load.threads)
    words = [sys.executable, "-P", "-c", _FIRST, path, *choice, *numbers, load.device]
    start = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stdout = process.stdout or io.StringIO()
        stdout.readline()
        seconds = time.perf_counter() - start
        memory = stdout.readline()  # communicate() would miss what is buffered
        _, said = process.communicate()
    if process.returncode or not memory:
        last = said.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        raise VitrailError(f"{choice} did not start in a process of its own ({last}).")
    return seconds, int(memory)


def answer_first(path: str, engine: str, precision: str, batch: str, threads: str, device: str) -> None:
    """What a new process does: one image, then a batch. Prints a line after the first, and its memory in the end."""
    opened = ENGINES[engine].open(path, device, precision)
    pixels = crop_embedded_images(opened.info.preprocess, int(batch))
    with opened.running(int(threads)) as run:
        run(pixels[:1])
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        run(pixels)
    sys.stdout.write(f"{_peak_memory()}\n")


def _peak_memory() -> int:
    """Bytes that this process has held at most. Linux counts what the parent held, unless it is read like this."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
