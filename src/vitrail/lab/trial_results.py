"""Results of a lab: `results.jsonl` with one line per trial."""

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.core.errors import UsageError, VitrailError
from vitrail.lab.rates import RateChoice, choose_rate, rate_trial
from vitrail.lab.training import FIRST_RATES, RATE_SEEDS, RATES
from vitrail.lab.trial import Trial, unpack

_UNKNOWN_MACHINE = "unknown"  # results of earlier versions do not name their machine


class Results:
    """Finished trials by id. Incomplete lines of a killed process are skipped, and their trials are run again."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._fingerprint = path, fingerprint
        self._records: dict[str, dict[str, Any]] = {}
        self._choices: dict[str, RateChoice] = {}
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
        self._choices.clear()

    # Learning rates

    def rate_trials(self, trial: Trial) -> list[Trial]:
        """Return the trials that choose the learning rate of a training trial, as far as they are known now.

        These are all rates that were tried for it and its peers, and the next rate if the best one is at an end.
        """
        if not needs_rate(trial):
            return []
        return [
            rate_trial(variant, rate, seed)
            for variant in (trial, *trial.peers)
            for rate in self._rates_to_try(variant)
            for seed in RATE_SEEDS
        ]

    def _rates_to_try(self, variant: Trial) -> tuple[float, ...]:
        """Return the rates that were tried for a variant and those that could still be better."""
        choice = self._choice(variant)
        tried = tuple(choice.means)
        if not set(FIRST_RATES) <= set(tried):
            return FIRST_RATES
        ends = ((min(tried), -1), (max(tried), 1))
        further = [RATES.index(end) + step for end, step in ends if end == choice.best]
        return (*tried, *(RATES[index] for index in further if 0 <= index < len(RATES)))

    def _choice(self, variant: Trial) -> RateChoice:
        """Return the rates of a variant that were tried under every seed of the choice."""
        key = rate_trial(variant, 0.0, 0).trial_id(self._fingerprint)
        if key not in self._choices:
            by_rate = {}
            for rate in RATES:
                results = [self.get(rate_trial(variant, rate, seed)) for seed in RATE_SEEDS]
                finished = [_validation_correctness(result) for result in results if result is not None]
                if len(finished) == len(RATE_SEEDS):
                    by_rate[rate] = np.stack(finished)
            self._choices[key] = RateChoice(by_rate)
        return self._choices[key]

    def _is_rate_known(self, variant: Trial) -> bool:
        return set(self._rates_to_try(variant)) <= self._choice(variant).means.keys()

    def rate(self, trial: Trial) -> float | None:
        """Return the chosen learning rate. None while a trial that could change the choice is missing."""
        variants = (trial, *trial.peers)
        if not all(map(self._is_rate_known, variants)):
            return None
        own, *others = map(self._choice, variants)
        return choose_rate(own, others)

    def validation_accuracy(self, trial: Trial) -> float | None:
        """Return the mean validation accuracy of the best learning rate. None while a rate is not chosen.

        It is measured under the seeds of the choice.
        """
        return None if self.rate(trial) is None else max(self._choice(trial).means.values())

    def is_cut_off(self, trial: Trial) -> bool:
        """Return whether the outermost rate was chosen for a trial or for a model that it measures.

        The best learning rate may then lie outside the range that was tried.
        """
        if not needs_rate(trial):
            return any(self.is_cut_off(part) for part in trial.inputs)
        return self.rate(trial) in (RATES[0], RATES[-1])

    def plausible_rates(self, trial: Trial) -> dict[float, list[dict[str, Any]]]:
        """Return the results, under the seeds of the choice, of each rate that may be the best.

        Empty if the rate is not chosen by the lab. The chosen rate is the first.
        """
        rate = self.rate(trial) if needs_rate(trial) else None
        if rate is None:
            return {}
        by_rate = {}
        for candidate in dict.fromkeys((rate, *self._choice(trial).within(2))):
            outcomes = (self.get(rate_trial(trial, candidate, seed)) for seed in RATE_SEEDS)
            by_rate[candidate] = [result for result in outcomes if result is not None]
        return by_rate

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

    def seconds(self, trial: Trial) -> float | None:
        """Return the processor seconds of a trial and of the trainings that it measures. None if they are unknown."""
        parts = [(self.measured(part) or {}).get("seconds", 0.0) for part in (*trial.inputs, trial)]
        return sum(parts) or None

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


def needs_rate(trial: Trial) -> bool:
    """Return whether a trial trains with a learning rate that is not chosen yet."""
    return trial.settings.get("learning_rate", 0) is None


def _validation_correctness(result: dict[str, Any]) -> np.ndarray:
    """Return correctness on validation images, or the score alone if the result has no predictions on them."""
    if "validation_right" in result:
        return unpack(result["validation_right"], result["validation_count"])
    return np.array([result["validation_accuracy"]])
