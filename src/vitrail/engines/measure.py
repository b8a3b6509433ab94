"""How fast each engine starts and answers here."""

import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import repeat
from pathlib import Path

from vitrail.console import say
from vitrail.data.ahead import in_order
from vitrail.engines.base import Engine, EngineName, batch_for
from vitrail.engines.cache import MODEL
from vitrail.engines.choose import Speeds
from vitrail.engines.eager import TorchEngine
from vitrail.engines.export import sample
from vitrail.engines.runtime import OnnxEngine
from vitrail.weights.bundle import load

_ROUNDS, _ENOUGH = 5, 3.0  # rounds at most, and seconds after which no further one begins

# In a process of its own, because in this one everything may be loaded already.
_STARTS: dict[EngineName, str] = {
    "torch": "import sys; from vitrail.weights.bundle import load; load(sys.argv[1])",
    "onnx": "import sys; from vitrail.engines.base import need; need('onnxruntime').InferenceSession(sys.argv[1])",
}


def measure(path: str, folder: Path, threads: int) -> Speeds:
    """For each engine the seconds to start and the seconds for a picture, with `threads` at work side by side."""
    say("measuring which engine is faster here (once)")
    bundle = load(path)
    engines: dict[EngineName, Engine] = {
        "torch": TorchEngine(bundle),
        "onnx": OnnxEngine(folder, bundle.parts),
    }
    pixels = sample(bundle.preprocess, batch_for(bundle.model.config))
    seconds: dict[EngineName, list[float]] = {name: [] for name in engines}
    began = time.perf_counter()
    for number in range(1 + _ROUNDS):
        for name, engine in engines.items():
            with engine.running(1) as run:
                start = time.perf_counter()
                for _ in in_order(repeat(partial(run, pixels), threads), threads, ahead=threads):
                    pass
                seconds[name].append((time.perf_counter() - start) / (threads * len(pixels)))
        if number and time.perf_counter() - began > _ENOUGH:
            break
    files: dict[EngineName, str] = {"torch": path, "onnx": str(folder / MODEL)}
    speeds: Speeds = {
        # The first round is for warming up.
        name: {"start": _start(script, files[name]), "picture": statistics.median(seconds[name][1:])}
        for name, script in _STARTS.items()
    }
    words = ", ".join(
        f"{name} {1 / speed['picture']:.1f} images/s after {speed['start']:.1f} s" for name, speed in speeds.items()
    )
    say(words)
    return speeds


def _start(script: str, argument: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", script, argument], check=True, capture_output=True)
    return time.perf_counter() - start
