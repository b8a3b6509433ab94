"""What was measured of engines: `measured/FINGERPRINT.json` of the bundle, in the user's cache.

Speeds belong to a machine (processor, its instructions, cores, versions of the engines' packages) and to a load;
answers, and engine choices that were refused, to a machine. What another machine or version measured stays in the file
and is not read.
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
    """How an engine is called: `callers` threads at a time, each with batches of this size and `threads` threads; and
    the device on which torch computes."""

    batch: int
    callers: int
    threads: int
    device: str = "auto"

    def __str__(self) -> str:
        place = "" if self.device == "auto" else f", {self.device}"
        return f"batch {self.batch}, {self.callers} x {self.threads} threads{place}"


class Speed(NamedTuple):
    """What was measured of one engine choice."""

    image: float
    """Seconds per image."""
    start: float
    """Seconds from the start of a process to its first answer."""
    memory: int
    """Bytes that such a process holds at most."""
    size: int
    """Bytes on disk that it reads."""

    def seconds(self, images: float) -> float:
        """Seconds for a number of images; for infinitely many, those of one."""
        return self.image if images == float("inf") else self.start + images * self.image


class Agreement(NamedTuple):
    """How many answers of an engine choice are those of float32."""

    data: str
    images: int
    same: int
    right: int | None = None
    """Right answers, where they are known."""
    right_in_float32: int | None = None

    @property
    def changed(self) -> float:
        """Share of other answers."""
        return (self.images - self.same) / self.images


class Refusal(NamedTuple):
    """Why an engine choice cannot be used."""

    text: str
    lasts: bool
    """Whether this is so as long as bundle, machine and versions are the same."""


class BenchmarkStore:
    """The measurements of one bundle on this machine."""

    def __init__(self, path: Path, known: dict[str, Any]) -> None:
        self._path, self._known, self._machine = path, known, machine()

    @classmethod
    def read(cls, bundle: str | Path) -> Self:
        """What is kept of a bundle; a file that is missing or damaged holds nothing."""
        path = user_folder() / "measured" / f"{fingerprint(check_folder(bundle))}.json"
        return cls(path, _read(path))

    def speeds(self, load: Workload) -> dict[EngineChoice, Speed]:
        """The speeds under a load."""
        return _parsed(self._find("speeds", str(load)), Speed)

    def agreements(self) -> dict[EngineChoice, Agreement]:
        """How many answers of each engine choice were those of float32."""
        return _parsed(self._find("answers"), Agreement)

    def refused(self) -> dict[EngineChoice, Refusal]:
        """The engine choices that cannot be used under any load, and why."""
        return _parsed(self._find("refused"), Refusal)

    def keep_speeds(
        self, load: Workload, speeds: dict[EngineChoice, Speed], refused: dict[EngineChoice, Refusal] | None = None
    ) -> None:
        """Keep speeds, and the reasons that last; if they cannot be written, all is measured again next time."""
        lasting = {choice: reason for choice, reason in (refused or {}).items() if reason.lasts}
        no_longer = dict.fromkeys(speeds)
        self._keep({("speeds", str(load)): speeds, ("refused",): {**no_longer, **lasting}})

    def keep_agreements(self, agreements: dict[EngineChoice, Agreement]) -> None:
        """Keep answers, in place of earlier ones."""
        self._keep({("answers",): agreements})

    def _find(self, *names: str) -> object:
        found: object = self._known
        for name in (self._machine, *names):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _keep(self, sections: dict[tuple[str, ...], dict[EngineChoice, Any]]) -> None:
        try:
            with file_lock(self._path.with_suffix(".lock"), lambda holder: None):
                self._known = _read(self._path)  # another process may have measured meanwhile
                self._add(sections)
                with atomic_file(self._path, force=True) as file:
                    document = {"sha256": _checksum(self._known), "machines": self._known}
                    file.write(json.dumps(document, indent=2).encode())
        except VitrailError as error:
            self._add(sections)
            say(f"note: measurements cannot be kept, so they are made again next time: {error}")

    def _add(self, sections: dict[tuple[str, ...], dict[EngineChoice, Any]]) -> None:
        for names, rows in sections.items():
            place = self._known
            for name in (self._machine, *names):
                if not isinstance(place.get(name), dict):
                    place[name] = {}
                place = place[name]
            place |= {str(choice): None if row is None else row._asdict() for choice, row in rows.items()}


def _read(path: Path) -> dict[str, Any]:
    """The measurements by machine; a file that is missing or damaged holds none."""
    try:
        document = read_json(path)
        known = document["machines"]
        return known if isinstance(known, dict) and document["sha256"] == _checksum(known) else {}
    except (VitrailError, KeyError, TypeError, ValueError):
        return {}


def _checksum(known: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _parsed(found: object, kind: Any) -> dict[EngineChoice, Any]:
    """Rows as they were kept; what has another form is as if it were not there."""
    rows: dict[EngineChoice, Any] = {}
    for name, row in found.items() if isinstance(found, dict) else ():
        engine, _, precision = name.partition(" ")
        try:
            rows[EngineChoice(engine, precision)] = kind(**row)
        except TypeError:
            continue
    return rows


def machine() -> str:
    """What speeds and answers depend on besides the bundle."""
    name, instructions = processor()
    packages = dict.fromkeys(package for engine in ENGINES for package in ENGINES[engine].packages)
    versions = ", ".join(f"{package} {version_of(package)}" for package in packages)
    return f"{name} ({instructions}), {os.cpu_count()} cores, vitrail {__version__} ({FORMAT}), {versions}"
