"""The faster engine for a bundle on this machine: measured once, remembered beside the ONNX file."""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from vitrail.console import say
from vitrail.engines.base import EngineName, need
from vitrail.engines.cache import SPEED, ready
from vitrail.errors import DamagedError, VitrailError
from vitrail.storage import read_json, whole_file
from vitrail.weights.parts import read_parts

Speeds = dict[EngineName, dict[str, float]]


def faster(path: str, pictures: int, threads: int) -> EngineName:
    """`torch` or `onnx`: who answers so many pictures first, its start included. Torch where the other cannot be had,
    and that is said."""
    read_parts(path, weights=False).check_classifies()
    try:
        need("onnxruntime")
        folder = ready(path)
    except DamagedError:
        raise
    except VitrailError as error:
        say(f"engine torch: {error}")
        return "torch"
    speeds = remembered(folder, threads)
    if speeds is None:
        from vitrail.engines.measure import measure

        speeds = measure(path, folder, threads)
        remember(folder, threads, speeds)
    seconds = {name: speed["start"] + pictures * speed["picture"] for name, speed in speeds.items()}
    return min(seconds, key=seconds.__getitem__)


def remembered(folder: Path, threads: int) -> Speeds | None:
    """What was measured on a machine like this one with so many threads, if anything was."""
    try:
        known = _read(folder)[_machine(threads)]
        return {name: {key: float(known[name][key]) for key in ("start", "picture")} for name in get_args(EngineName)}
    except (KeyError, TypeError, ValueError):
        return None


def remember(folder: Path, threads: int, speeds: Speeds) -> None:
    """Keep a measurement; where nothing can be written, it is made again next time."""
    known = _read(folder) | {_machine(threads): speeds}
    try:
        with whole_file(folder / SPEED, force=True) as file:
            file.write(json.dumps(known, indent=2).encode())
    except VitrailError as error:
        say(str(error))


def _read(folder: Path) -> dict[str, Any]:
    try:
        known = read_json(folder / SPEED)
    except VitrailError:
        return {}
    return known if isinstance(known, dict) else {}


def _machine(threads: int) -> str:
    """What decides about speed: processor, cores, threads, and who computes."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor() or platform.machine()
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "onnxruntime"))
    return f"{processor}, {os.cpu_count()} cores, {threads} threads, {versions}"
