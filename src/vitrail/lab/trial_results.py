"""Results of a lab: `results.jsonl` with one line per trial, and the learning rates chosen from it."""

import dataclasses
import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.errors import UsageError, VitrailError
from vitrail.lab.training import FURTHER_RATES, RATES
from vitrail.lab.trial import Trial, unpack

_UNKNOWN_MACHINE = "unknown"  # results of earlier versions do not name their machine


class Results:
    """Finished trials by id. Incomplete lines of a killed process are skipped, and their trials are run again."""

    def __init__(self, path: Path, fingerprint: str, smallest: int, validation: int = 2000) -> None:
        """Read the results. Learning rates are chosen at `smallest` training images by `validation` images."""
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
        """Append the record of a finished trial to the file, then keep it in memory."""
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
        """Keep a record in memory by the id of its trial, which is recomputed: another version may have written it."""
        self._records[Trial.from_json(record["cell"]).trial_id(self._fingerprint)] = record

    # Learning rates: chosen for each variant of a model by validation images at the smallest size

    def rate_trials(self, trial: Trial) -> list[Trial]:
        """Return the trials that choose the learning rate of a training trial: at the smallest size, with one seed."""
        if not needs_rate(trial):
            return []
        overrides: dict[str, Any] = {"count": self._smallest} if "count" in trial.settings else {}
        if trial.settings.get("permutation"):  # all permutations of a level share one rate
            overrides["permutation"] = [*trial.settings["permutation"][:2], 0]
        return [trial.clone_with(learning_rate=rate, seed=0, **overrides) for rate in RATES]

    def rate(self, trial: Trial) -> float | None:
        """Return the chosen learning rate. None while a trial of a standard rate is missing."""
        return self._choose_rate(trial)[0]

    def next_rate_trial(self, trial: Trial) -> Trial | None:
        """Return the next trial outside the range tried so far if the best rate is at its end, else None."""
        return self._choose_rate(trial)[1]

    def _choose_rate(self, trial: Trial) -> tuple[float | None, Trial | None]:
        """Return the chosen learning rate and the trial that could still change it.

        The best of the standard rates is chosen. If it is the smallest or the largest, rates beyond that end are
        tried in turn. A further rate is chosen if it is better by more than two standard errors.
        """
        rate_trials = self.rate_trials(trial)
        accuracies = [self._validation_accuracy(rate_trial) for rate_trial in rate_trials]
        scores = [accuracy for accuracy in accuracies if accuracy is not None]
        if not rate_trials or len(scores) < len(rate_trials):
            return None, None
        score, rate = max(scores), RATES[int(np.argmax(scores))]
        for further in FURTHER_RATES.get(rate, ()):
            rate_trial = rate_trials[0].clone_with(learning_rate=further)
            further_accuracy = self._validation_accuracy(rate_trial)
            if further_accuracy is None:
                return rate, rate_trial
            if not _is_better(further_accuracy, score, self._validation_count(rate_trial)):
                break
            score, rate = further_accuracy, further
        return rate, None

    def is_cut_off(self, trial: Trial) -> bool:
        """Return whether the outermost rate was chosen for a trial or for a model that it measures.

        The best learning rate may then lie outside the range that was tried.
        """
        if not needs_rate(trial):
            return any(self.is_cut_off(part) for part in trial.inputs)
        return self.rate(trial) in {rates[-1] for rates in FURTHER_RATES.values()}

    def _validation_accuracy(self, rate_trial: Trial) -> float | None:
        record = self._records.get(rate_trial.trial_id(self._fingerprint))
        return None if record is None else record["result"]["validation_accuracy"]

    def _validation_count(self, rate_trial: Trial) -> int:
        """Return the number of validation images of a finished trial. Earlier versions did not store it."""
        return self._records[rate_trial.trial_id(self._fingerprint)]["result"].get("validation_count", self._validation)

    def resolve(self, trial: Trial) -> Trial | None:
        """Return the trial with the chosen learning rates, also in its inputs. None while a rate is not chosen."""
        if needs_rate(trial):
            rate = self.rate(trial)
            return None if rate is None else trial.clone_with(learning_rate=rate)
        inputs = [self.resolve(source) for source in trial.inputs]
        resolved = tuple(source for source in inputs if source is not None)
        return dataclasses.replace(trial, inputs=resolved) if len(resolved) == len(inputs) else None

    # Access for questions

    def get(self, trial: Trial) -> dict[str, Any] | None:
        """Return the result of a trial. None if it was not run."""
        record = self._record(trial)
        return None if record is None else record["result"]

    def measured(self, trial: Trial) -> dict[str, Any] | None:
        """Return the times and memory of a trial. None if it was not run."""
        record = self._record(trial)
        return None if record is None else record["measured"]

    def machine(self, trial: Trial) -> str | None:
        """Return the name of the machine that ran a trial. None if it was not run."""
        record = self._record(trial)
        return None if record is None else record.get("machine", _UNKNOWN_MACHINE)

    def machines(self) -> dict[str, int]:
        """Return the number of trials by machine."""
        return dict(Counter(record.get("machine", _UNKNOWN_MACHINE) for record in self._records.values()))

    def _record(self, trial: Trial) -> dict[str, Any] | None:
        resolved = self.resolve(trial)
        return None if resolved is None else self._records.get(resolved.trial_id(self._fingerprint))

    def folder(self, output: Path, trial: Trial) -> Path:
        """Return the folder of the bundle of a resolved training trial."""
        return output / "cells" / trial.trial_id(self._fingerprint)

    def has(self, trial: Trial) -> bool:
        """Return whether a resolved trial was run."""
        return trial.trial_id(self._fingerprint) in self._records

    def right(self, trials: list[Trial]) -> np.ndarray | None:
        """Return the correctness of test predictions (seeds, images) of finished trials. None if none is finished."""
        results = [result for trial in trials if (result := self.get(trial)) is not None]
        return np.stack([unpack(result["right"], result["count"]) for result in results]) if results else None


def _is_better(accuracy: float, reference: float, count: int) -> bool:
    """Return whether an accuracy on `count` images exceeds another by more than two standard errors."""
    return accuracy - reference > 2 * math.sqrt((accuracy * (1 - accuracy) + reference * (1 - reference)) / count)


def needs_rate(trial: Trial) -> bool:
    """Return whether a trial trains with a learning rate that is not chosen yet."""
    return trial.settings.get("learning_rate", 0) is None
