"""Stored benchmark results of engines: `measured/FINGERPRINT.json` in the user's cache, one file per bundle.

Speeds depend on the machine (processor, its instructions, cores, versions of the engines' packages) and on the
workload. Agreements and rejected engine choices depend on the machine only. Results of other machines and versions stay
in the file and are ignored.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Self

from vitrail import __version__
from vitrail.bundles.folder import check_folder
from vitrail.core.errors import VitrailError
from vitrail.core.files import atomic_file, file_lock, read_json, user_folder
from vitrail.core.terminal import say
from vitrail.inference.engine import EngineChoice, processor, version_of
from vitrail.inference.model_files import FORMAT, fingerprint
from vitrail.inference.registry import ENGINES


class Workload(NamedTuple):
    """How an engine is called: `callers` threads at a time, each with batches of this size and `threads` computing
    threads. `device` is where torch computes."""

    batch: int
    callers: int
    threads: int
    device: str = "auto"

    def __str__(self) -> str:
        device = "" if self.device == "auto" else f", {self.device}"
        return f"batch {self.batch}, {self.callers} x {self.threads} threads{device}"


class Speed(NamedTuple):
    """Measured speed, memory and size of an engine choice."""

    image: float
    """Seconds per image."""
    start: float
    """Seconds from the start of a process to its first prediction."""
    memory: int
    """Peak memory of this process in bytes."""
    size: int
    """Size of the model on disk in bytes."""

    def seconds(self, images: float) -> float:
        """Return the seconds for a number of images with the start, or the seconds per image for infinitely many."""
        return self.image if images == float("inf") else self.start + images * self.image


class Agreement(NamedTuple):
    """How often the predictions of an engine choice are the same as with torch in float32."""

    data: str
    images: int
    same: int
    """Number of images with the same prediction."""
    right: int | None = None
    """Number of correct predictions, if the data has labels."""
    right_in_float32: int | None = None

    @property
    def changed(self) -> float:
        """Share of images with a different prediction."""
        return (self.images - self.same) / self.images


class Refusal(NamedTuple):
    """The reason why an engine choice cannot be used."""

    text: str
    lasts: bool
    """Whether the reason remains until the bundle, the machine or a version changes."""


class BenchmarkStore:
    """The stored benchmark results of one bundle on this machine."""

    def __init__(self, path: Path, machines: dict[str, Any]) -> None:
        self._path, self._machines, self._machine = path, machines, describe_machine()

    @classmethod
    def read(cls, bundle: str | Path) -> Self:
        """Read the results of a bundle. A missing or corrupt file has none."""
        path = user_folder() / "measured" / f"{fingerprint(check_folder(bundle))}.json"
        return cls(path, _read_machines(path))

    def speeds(self, workload: Workload) -> dict[EngineChoice, Speed]:
        """Return the stored speeds under a workload."""
        return _parse_rows(self._section("speeds", str(workload)), Speed)

    def agreements(self) -> dict[EngineChoice, Agreement]:
        """Return the stored agreement of each engine choice with torch in float32."""
        return _parse_rows(self._section("answers"), Agreement)

    def refused(self) -> dict[EngineChoice, Refusal]:
        """Return the engine choices that cannot be used under any workload, with the reasons."""
        return _parse_rows(self._section("refused"), Refusal)

    def save_speeds(
        self, workload: Workload, speeds: dict[EngineChoice, Speed], refused: dict[EngineChoice, Refusal] | None = None
    ) -> None:
        """Store the speeds under a workload and the lasting refusals. If the file cannot be written, print a note."""
        lasting = {choice: reason for choice, reason in (refused or {}).items() if reason.lasts}
        usable = dict.fromkeys(speeds)
        self._save({("speeds", str(workload)): speeds, ("refused",): {**usable, **lasting}})

    def save_agreements(self, agreements: dict[EngineChoice, Agreement]) -> None:
        """Store agreements. They replace earlier ones of the same engine choices."""
        self._save({("answers",): agreements})

    def _section(self, *names: str) -> object:
        section: object = self._machines
        for name in (self._machine, *names):
            section = section.get(name) if isinstance(section, dict) else None
        return section

    def _save(self, sections: dict[tuple[str, ...], dict[EngineChoice, Any]]) -> None:
        try:
            with file_lock(self._path.with_suffix(".lock"), lambda holder: None):
                self._machines = _read_machines(self._path)  # another process may have written the file meanwhile
                self._update(sections)
                with atomic_file(self._path, force=True) as file:
                    document = {"sha256": _checksum_machines(self._machines), "machines": self._machines}
                    file.write(json.dumps(document, indent=2).encode())
        except VitrailError as error:
            self._update(sections)
            say(f"note: measurements cannot be stored, so they are repeated next time: {error}")

    def _update(self, sections: dict[tuple[str, ...], dict[EngineChoice, Any]]) -> None:
        """Write rows into the sections of this machine, in memory. A row that is None overwrites an earlier row."""
        for names, rows in sections.items():
            section = self._machines
            for name in (self._machine, *names):
                if not isinstance(section.get(name), dict):
                    section[name] = {}
                section = section[name]
            section |= {str(choice): None if row is None else row._asdict() for choice, row in rows.items()}


def _read_machines(path: Path) -> dict[str, Any]:
    """Return the benchmark results by machine. A missing or corrupt file has none."""
    try:
        document = read_json(path)
        machines = document["machines"]
        is_intact = isinstance(machines, dict) and document["sha256"] == _checksum_machines(machines)
        return machines if is_intact else {}
    except (VitrailError, KeyError, TypeError, ValueError):
        return {}


def _checksum_machines(machines: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(machines, sort_keys=True).encode()).hexdigest()


def _parse_rows(section: object, row_type: Any) -> dict[EngineChoice, Any]:
    """Return the rows of a section (Speed, Agreement or Refusal) by engine choice. Invalid rows are skipped."""
    rows: dict[EngineChoice, Any] = {}
    for name, fields in section.items() if isinstance(section, dict) else ():
        engine, _, precision = name.partition(" ")
        try:
            rows[EngineChoice(engine, precision)] = row_type(**fields)
        except TypeError:
            continue
    return rows


def describe_machine() -> str:
    """Return the processor, its instructions and cores, and the versions of vitrail and of the engines' packages.

    Speeds and predictions of a bundle depend on these.
    """
    name, instructions = processor()
    packages = dict.fromkeys(package for engine in ENGINES for package in ENGINES[engine].packages)
    versions = ", ".join(f"{package} {version_of(package)}" for package in packages)
    return f"{name} ({instructions}), {os.cpu_count()} cores, vitrail {__version__} ({FORMAT}), {versions}"
