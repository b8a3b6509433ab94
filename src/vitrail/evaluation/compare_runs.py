"""Runs side by side: scores, settings that differ, and a paired test of each pair with the same test images."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.evaluation.paired import PairedComparison, holm_levels
from vitrail.evaluation.predictions.saved_predictions import PREDICTIONS_FILE as ANSWERS
from vitrail.evaluation.run_reader import Run, find_runs, read_run, short_names

_BESIDE_THE_RESULT = ("workers", "keep", "cache", "cache_gigabytes", "checkpoint_seconds", "snapshots", "gradients")
_FIRST = ("data", "epochs", "steps")  # of the settings that differ, those that one looks for first


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPair:
    """A paired comparison of two runs."""

    one: str
    other: str
    paired: PairedComparison
    level: float
    """The level at which it is judged, by Holm's correction over all pairs."""

    @property
    def verdict(self) -> str:
        """Which is better, or that this cannot be told."""
        return self.paired.verdict(self.one, self.other, self.level)

    @property
    def sentence(self) -> str:
        """The comparison in one line."""
        return self.paired.sentence(self.one, self.other, self.level)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Several runs, the best first."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    differences: dict[str, list[Any]]
    """The settings that differ, with the value of each run; None where it has none."""
    pairs: tuple[RunPair, ...]
    groups: tuple[str, ...]
    """The test images of runs that kept their answers, and these runs, in words."""

    @property
    def have_same_images(self) -> bool:
        """Whether all scores are of the same images; of runs that kept no answers, as far as data, split and count
        tell."""
        judged = [(run.data, run.final.get("split"), run.final["count"]) for run in self.runs if run.final is not None]
        is_known = not any(run.lacks_answers for run in self.runs)
        return len(self.groups) < 2 and (is_known or len(set(judged)) < 2)

    @property
    def notes(self) -> list[str]:
        """Why some runs are not compared."""
        notes = []
        for run in self.runs:
            if run.lacks_answers:
                command = run.keeping_command
                how = "its command once more with --resume auto" if command is None else f"`{command}`"
                notes.append(f"{str(run.folder)!r} has no {ANSWERS}, so it is not compared: {how} makes it")
        if len(self.groups) > 1:
            listed = "; ".join(self.groups)
            notes.append(
                f"runs were tested on different images, and only those on the same ones are compared ({listed})"
            )
        return notes

    def to_json(self) -> dict[str, Any]:
        """All of it, as `vitrail runs --json` prints it."""
        return {
            "runs": [_describe(run, name) for run, name in zip(self.runs, self.names, strict=True)],
            "differences": self.differences,
            "pairs": [
                {
                    "one": pair.one,
                    "other": pair.other,
                    "only_one": pair.paired.one,
                    "only_other": pair.paired.other,
                    "count": pair.paired.count,
                    "p_value": pair.paired.p_value,
                    "level": pair.level,
                    "verdict": pair.verdict,
                    "sentence": pair.sentence,
                }
                for pair in self.pairs
            ],
            "notes": self.notes,
        }


def compare_runs(paths: Sequence[str | Path]) -> RunComparison:
    """Read runs and compare them."""
    runs = sorted(map(read_run, find_runs(paths)), key=lambda run: -(run.final or {"accuracy": -1})["accuracy"])
    names = short_names(runs)
    known = [(run, name) for run, name in zip(runs, names, strict=True) if run.answers is not None]
    found: dict[tuple[str, str], PairedComparison] = {}
    groups: list[list[tuple[Run, str]]] = []
    for run, name in known:
        mine = next((group for group in groups if _are_comparable(group[0][0], run)), None)
        groups.append([(run, name)]) if mine is None else mine.append((run, name))
    for group in groups:
        for (one, first), (other, second) in itertools.combinations(group, 2):
            if one.answers is not None and other.answers is not None:
                found[first, second] = one.answers.against(other.answers)
    levels = holm_levels({both: paired.p_value for both, paired in found.items()})
    return RunComparison(
        runs=tuple(runs),
        names=tuple(names),
        differences=_differences(runs),
        pairs=tuple(
            RunPair(one=one, other=other, paired=paired, level=levels[one, other])
            for (one, other), paired in found.items()
        ),
        groups=tuple(f"{_images(group[0][0])}: {', '.join(name for _, name in group)}" for group in groups),
    )


def _differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The settings that differ. Settings that only models of another family have say no more than its name."""
    given = dict.fromkeys(key for run in runs for key in run.settings if key not in _BESIDE_THE_RESULT)
    keys = [*(key for key in _FIRST if key in given), *(key for key in given if key not in _FIRST)]
    found = {}
    for key in keys:
        # What a model of its kind has at all, though this one may have none.
        having = {run.family for run in runs if key in run.settings} if key.startswith("model.") else None
        values = [_value(run, key) for run in runs if having is None or having & {run.family}]
        if any(value != values[0] for value in values):
            found[key] = [_value(run, key) for run in runs]
    return found


def _value(run: Run, key: str) -> Any:
    """A setting of a run. The steps of a run of so many epochs follow from its data, so they are those it planned."""
    value = run.settings.get(key)
    return run.total if key == "steps" and value is None else value


def _are_comparable(one: Run, other: Run) -> bool:
    return one.answers is not None and other.answers is not None and one.answers.difference(other.answers) is None


def _images(run: Run) -> str:
    answers = run.answers
    return "" if answers is None else f"{answers.data} ({answers.split}, {len(answers):,})"


def _describe(run: Run, name: str) -> dict[str, Any]:
    final = run.final or {}
    return {
        "name": name,
        "folder": str(run.folder),
        "model": run.model,
        "result": run.result,
        "data": run.data,
        **{key: final.get(key) for key in ("split", "count", "accuracy", "accuracy_interval")},
        "steps": run.step,
        "seconds": run.seconds,
        "finished": run.is_finished,
        "settings": run.settings,
    }
