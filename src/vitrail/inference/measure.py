"""Measurement of the speed, start and memory of engines on this machine."""

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

_MAX_ROUNDS = 5
_MAX_SECONDS = 3.0  # per engine choice: no round starts after that
_PAUSE = 0.05  # seconds before a measurement: threads of ONNX Runtime spin for a while after a call
_MAX_SLOWDOWN = 10  # relative to the fastest engine choice for one image: slower ones get no further rounds

_START_SCRIPT = "import sys; from vitrail.inference.measure import run_first_batches; run_first_batches(*sys.argv[1:])"


def measure_speeds(path: str, choices: list[EngineChoice], workload: Workload) -> dict[EngineChoice, Speed]:
    """Measure the speed of each engine choice for the bundle at `path`.

    The engine choices are measured in turn, so that a machine that slows down meanwhile affects all of them.
    """
    say(f"measuring {', '.join(map(str, choices))} on this machine (once)")
    folders = {choice: ENGINES[choice.engine].prepare(path, choice.precision) for choice in choices}
    engines = {choice: ENGINES[choice.engine].open(path, workload.device, choice.precision) for choice in choices}
    seconds = _time_rounds(engines, workload)
    return {
        choice: Speed(seconds[choice], *_measure_start(path, choice, workload), _folder_size(folders[choice]))
        for choice in choices
    }


def _time_rounds(engines: dict[EngineChoice, Engine], workload: Workload) -> dict[EngineChoice, float]:
    """Return the seconds per image of each engine choice in its fastest round, which other programs disturb least.

    The first round is a warm-up. Engine choices that are much slower than the fastest have no rounds: their time is
    that of a single image.
    """
    crops = crop_embedded_images(next(iter(engines.values())).info.preprocess, workload.batch)
    pixels = np.resize(crops, (workload.batch, *crops.shape[1:]))
    with contextlib.ExitStack() as stack:
        runs = {
            choice: stack.enter_context(engine.running(workload.threads, workload.callers))
            for choice, engine in engines.items()
        }
        image_seconds = {choice: _time_image(run, pixels[:1], 1) for choice, run in runs.items()}
        candidates = [choice for choice in runs if image_seconds[choice] <= _MAX_SLOWDOWN * min(image_seconds.values())]
        rounds: dict[EngineChoice, list[float]] = {choice: [] for choice in candidates}
        start = time.perf_counter()
        for number in range(1 + _MAX_ROUNDS):
            for choice in candidates:
                rounds[choice].append(_time_image(runs[choice], pixels, workload.callers))
            if number and time.perf_counter() - start > _MAX_SECONDS * len(candidates):
                break
    return image_seconds | {choice: min(values[1:]) for choice, values in rounds.items()}


def _time_image(run: Run, pixels: np.ndarray, callers: int) -> float:
    """Return the seconds per image if `callers` threads compute a batch each, after a pause and a warm-up image."""
    time.sleep(_PAUSE)
    run(pixels[:1])
    start = time.perf_counter()
    for _ in prefetch(repeat(partial(run, pixels), callers), callers, ahead=callers):
        pass
    return (time.perf_counter() - start) / (callers * len(pixels))


def _measure_start(path: str, choice: EngineChoice, workload: Workload) -> tuple[float, int]:
    """Return the seconds of a new process to its first prediction, and its peak memory in bytes.

    This process is not measured, because it may have imported the engine already.
    """
    numbers = str(workload.batch), str(workload.callers * workload.threads)
    command = [sys.executable, "-P", "-c", _START_SCRIPT, path, *choice, *numbers, workload.device]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stdout = process.stdout or io.StringIO()
        stdout.readline()
        seconds = time.perf_counter() - start
        memory = stdout.readline()  # communicate() would miss buffered lines
        _, stderr = process.communicate()
    if process.returncode or not memory:
        reason = stderr.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        raise VitrailError(f"{choice} cannot start in a new process ({reason}).")
    return seconds, int(memory)


def run_first_batches(path: str, name: str, precision: str, batch: str, threads: str, device: str) -> None:
    """Compute an image and then a batch in a new process, whose start and memory are measured.

    Prints a line after the image, and the peak memory of the process in bytes after the batch.
    """
    engine = ENGINES[name].open(path, device, precision)
    pixels = crop_embedded_images(engine.info.preprocess, int(batch))
    with engine.running(int(threads)) as run:
        run(pixels[:1])
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        run(pixels)
    sys.stdout.write(f"{_peak_memory()}\n")


def _peak_memory() -> int:
    """Return the peak memory of this process in bytes. On Linux, getrusage would include the memory of the parent."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
