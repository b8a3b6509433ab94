"""The faster engine for a bundle on this machine: measured once, stored beside the ONNX file."""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.configs.engines import ENGINES
from vitrail.console import say
from vitrail.engines.base import cores
from vitrail.engines.cache import SPEED
from vitrail.errors import DamagedError, UsageError, VitrailError, did_you_mean
from vitrail.storage import atomic_file, read_json
from vitrail.weights.parts import read_parts

if TYPE_CHECKING:
    from vitrail.weights.bundle import Bundle

Speeds = dict[str, dict[str, float]]

_ALWAYS, *_OTHERS = ENGINES


def check_engine(name: str) -> None:
    """Refuse a name that is neither an engine nor `auto`."""
    if name != "auto" and name not in ENGINES:
        raise UsageError(f"Engine must be {', '.join(ENGINES)} or auto, got {name!r}.{did_you_mean(name, ENGINES)}")


def choose_engine(
    name: str, bundle: "Bundle | str | Path", images: int, threads: int | None, device: str | None
) -> str:
    """The named engine; for `auto` the faster one for this number of images, which for a bundle in memory is torch."""
    check_engine(name)
    if name != "auto":
        return name
    if not isinstance(bundle, str | Path):
        return _ALWAYS
    return faster(str(bundle), images, threads or cores(), "cpu" if device is None else device)


def faster(path: str, images: int, threads: int, device: str = "cpu") -> str:
    """The engine that finishes this number of images first, including its start. Engines that are not available are
    omitted with a note, those that do not compute on the device without one."""
    read_parts(path, weights=False).check_computable()
    folders = {}
    for name in _OTHERS:
        if not ENGINES[name].computes_on(device):
            continue
        try:
            folders[name] = ENGINES[name].prepare(path)
        except DamagedError:
            raise
        except VitrailError as error:
            say(f"engine {_ALWAYS}: {error}")
    if not folders:
        return _ALWAYS
    folder = next(iter(folders.values()))
    speeds = remembered(folder, threads, [_ALWAYS, *folders])
    if speeds is None:
        from vitrail.engines.measure import measure

        speeds = measure(path, [_ALWAYS, *folders], threads)
        remember(folder, threads, speeds)
    seconds = {name: speed["start"] + images * speed["picture"] for name, speed in speeds.items()}
    return min(seconds, key=seconds.__getitem__)


def remembered(folder: Path, threads: int, names: list[str]) -> Speeds | None:
    """Stored measurements of these engines with this number of threads on such a machine, if there are any."""
    try:
        known = _read(folder)[_machine(threads)]
        return {name: {key: float(known[name][key]) for key in ("start", "picture")} for name in names}
    except (KeyError, TypeError, ValueError):
        return None


def remember(folder: Path, threads: int, speeds: Speeds) -> None:
    """Store a measurement; if it cannot be written, it will be repeated next time."""
    known = _read(folder) | {_machine(threads): speeds}
    try:
        with atomic_file(folder / SPEED, force=True) as file:
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
    """What the speed depends on: processor, cores, threads and package versions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor() or platform.machine()
    packages = ["torch", *(package for name in _OTHERS for package in ENGINES[name].packages)]
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{processor}, {os.cpu_count()} cores, {threads} threads, {versions}"
