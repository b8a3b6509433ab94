"""What a lab knows so far: `results.jsonl`, a line for each cell, and the learning rates that follow from it."""

import dataclasses
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.errors import UsageError, VitrailError
from vitrail.lab.training import BEYOND, RATES
from vitrail.lab.trial import Cell, unpack

_UNKNOWN = "unknown"  # results of earlier versions do not tell their machine


class Results:
    """Finished cells by their key. Lines that a killed process tore are left out, and their cells run again."""

    def __init__(self, path: Path, fingerprint: str, smallest: int, validation: int = 2000) -> None:
        """`smallest` is the number of training images at which learning rates are chosen, by so many `validation`
        images."""
        self._path, self._fingerprint, self._smallest, self._validation = path, fingerprint, smallest, validation
        self._records: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    self._remember(json.loads(line))
                except (ValueError, TypeError, KeyError, UsageError):
                    continue

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: dict[str, Any]) -> None:
        """Remember a finished cell, on disk before all."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            with self._path.open("ab+") as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise VitrailError(f"Writing {str(self._path)!r} failed ({error.strerror}).") from None
        self._remember(record)

    def _remember(self, record: dict[str, Any]) -> None:
        """By the key of its cell, which is not that of the line if another version wrote it."""
        self._records[Cell.from_json(record["cell"]).key(self._fingerprint)] = record

    # Learning rates: each variant of a model has its own, chosen by validation images at the smallest size

    def trials(self, cell: Cell) -> list[Cell]:
        """The cells that decide the learning rate of a trained cell: the same at the smallest size, under one seed."""
        if not needs_rate(cell):
            return []
        usual: dict[str, Any] = {"count": self._smallest} if "count" in cell.settings else {}
        if cell.settings.get("permutation"):  # one of a level is as good as another
            usual["permutation"] = [*cell.settings["permutation"][:2], 0]
        return [cell.changed(learning_rate=rate, seed=0, **usual) for rate in RATES]

    def rate(self, cell: Cell) -> float | None:
        """The chosen learning rate; None while a trial at a usual one is missing."""
        return self._choose(cell)[0]

    def beyond(self, cell: Cell) -> Cell | None:
        """The next trial outside the range tried so far, if the best rate is at its end; else None."""
        return self._choose(cell)[1]

    def _choose(self, cell: Cell) -> tuple[float | None, Cell | None]:
        """The chosen learning rate, and the trial that could still change it.

        The best of the usual rates is chosen. If that is the smallest or the largest of them, the rates beyond that end
        are tried in turn; each is chosen instead if it is better by more than two standard errors.
        """
        trials = self.trials(cell)
        found = [self._validation_accuracy(trial) for trial in trials]
        scores = [one for one in found if one is not None]
        if not trials or len(scores) < len(trials):
            return None, None
        score, rate = max(scores), RATES[int(np.argmax(scores))]
        for further in BEYOND.get(rate, ()):
            trial = trials[0].changed(learning_rate=further)
            reached = self._validation_accuracy(trial)
            if reached is None:
                return rate, trial
            if not _is_better(reached, score, self._validation_count(trial)):
                break
            score, rate = reached, further
        return rate, None

    def is_cut_off(self, cell: Cell) -> bool:
        """Whether the learning rates end before the best one for a cell, or for what it looks at: the outermost rate
        was chosen."""
        if not needs_rate(cell):
            return any(self.is_cut_off(part) for part in cell.of)
        return self.rate(cell) in {rates[-1] for rates in BEYOND.values()}

    def _validation_accuracy(self, trial: Cell) -> float | None:
        record = self._records.get(trial.key(self._fingerprint))
        return None if record is None else record["result"]["validation_accuracy"]

    def _validation_count(self, trial: Cell) -> int:
        """Images behind the accuracy of a trial that was run. Earlier versions did not note it."""
        return self._records[trial.key(self._fingerprint)]["result"].get("validation_count", self._validation)

    def resolve(self, cell: Cell) -> Cell | None:
        """The cell with its learning rate, and those of what it looks at; None while one is not known."""
        if needs_rate(cell):
            rate = self.rate(cell)
            return None if rate is None else cell.changed(learning_rate=rate)
        of = [self.resolve(part) for part in cell.of]
        known = tuple(part for part in of if part is not None)
        return dataclasses.replace(cell, of=known) if len(known) == len(of) else None

    # What questions read

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """What a cell found; None if it was not run."""
        record = self._record(cell)
        return None if record is None else record["result"]

    def measured(self, cell: Cell) -> dict[str, Any] | None:
        """Times and memory of a cell."""
        record = self._record(cell)
        return None if record is None else record["measured"]

    def machine(self, cell: Cell) -> str | None:
        """The machine that a cell was run on, in a few words; None if it was not run."""
        record = self._record(cell)
        return None if record is None else record.get("machine", _UNKNOWN)

    def machines(self) -> dict[str, int]:
        """How many cells were run on each machine."""
        return dict(Counter(record.get("machine", _UNKNOWN) for record in self._records.values()))

    def _record(self, cell: Cell) -> dict[str, Any] | None:
        resolved = self.resolve(cell)
        return None if resolved is None else self._records.get(resolved.key(self._fingerprint))

    def folder(self, output: Path, cell: Cell) -> Path:
        """Where the bundle of a resolved trained cell is."""
        return output / "cells" / cell.key(self._fingerprint)

    def has(self, cell: Cell) -> bool:
        """Whether a resolved cell was run."""
        return cell.key(self._fingerprint) in self._records

    def right(self, cells: list[Cell]) -> np.ndarray | None:
        """Right answers to the test images (seeds, images) of those cells that were run; None if there are none."""
        found = [record for cell in cells if (record := self.get(cell)) is not None]
        return np.stack([unpack(one["right"], one["count"]) for one in found]) if found else None


def _is_better(one: float, other: float, count: int) -> bool:
    """Whether one accuracy on so many validation images exceeds another by more than two standard errors."""
    return one - other > 2 * math.sqrt((one * (1 - one) + other * (1 - other)) / count)


def needs_rate(cell: Cell) -> bool:
    """Whether the cell trains with a learning rate that is still to be chosen."""
    return cell.settings.get("learning_rate", 0) is None
