"""Comparison of runs: scores, different settings, and a paired test of each pair with the same test images."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.core.natural_order import natural_key
from vitrail.evaluation.paired import PairedComparison, holm_levels
from vitrail.evaluation.predictions.saved_predictions import PREDICTIONS_FILE
from vitrail.evaluation.run_reader import Run, find_runs, read_run, short_names

# Settings that do not affect the result of a run.
_NEUTRAL_SETTINGS = ("workers", "keep", "cache", "cache_gigabytes", "checkpoint_seconds", "snapshots", "gradients")
_FIRST_SETTINGS = ("data", "epochs", "steps")  # the most important different settings, which are listed first


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPair:
    """A paired comparison of two runs."""

    first: str
    """Name of the first run."""
    second: str
    """Name of the second run."""
    paired: PairedComparison
    level: float
    """Significance level of this pair, by Holm's correction over all pairs."""

    @property
    def verdict(self) -> str:
        """The better run in a sentence, or "cannot tell"."""
        return self.paired.verdict(self.first, self.second, self.level)

    @property
    def sentence(self) -> str:
        """The comparison in one line."""
        return self.paired.sentence(self.first, self.second, self.level)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Several runs, with the most accurate first."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    differences: dict[str, list[Any]]
    """Different settings, with the value of each run, or None if the run does not have the setting."""
    pairs: tuple[RunPair, ...]
    groups: tuple[str, ...]
    """Descriptions of the test images, each with the names of the runs whose saved predictions are for these images."""

    @property
    def have_same_images(self) -> bool:
        """Whether all scores are of the same images.

        For runs without saved predictions, the data, the split and the number of images are compared.
        """
        test_sets = {
            (run.data, run.final.get("split"), run.final["count"]) for run in self.runs if run.final is not None
        }
        have_predictions = not any(run.lacks_predictions for run in self.runs)
        return len(self.groups) < 2 and (have_predictions or len(test_sets) < 2)

    @property
    def notes(self) -> list[str]:
        """Notes on the runs that are not compared, with the reasons."""
        notes = []
        for run in self.runs:
            if run.lacks_predictions:
                command = run.evaluate_command
                remedy = "its command again with --resume auto" if command is None else f"`{command}`"
                notes.append(
                    f"{str(run.folder)!r} has no {PREDICTIONS_FILE}, so it is not compared. To write it, run {remedy}"
                )
        if len(self.groups) > 1:
            notes.append(
                "runs were tested on different images, and only runs with the same images are compared"
                f" ({'; '.join(self.groups)})"
            )
        return notes

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as `vitrail runs --json` prints it."""
        return {
            "runs": [_describe(run, name) for run, name in zip(self.runs, self.names, strict=True)],
            "differences": self.differences,
            "pairs": [
                {
                    "one": pair.first,
                    "other": pair.second,
                    "only_one": pair.paired.only_first,
                    "only_other": pair.paired.only_second,
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
    """Read the runs in these folders and compare them: the best first, equal ones by folder, 2 before 10."""
    runs = sorted(
        map(read_run, find_runs(paths)),
        key=lambda run: (-(run.final or {"accuracy": -1})["accuracy"], natural_key(str(run.folder))),
    )
    names = short_names(runs)
    groups: list[list[tuple[Run, str]]] = []  # runs with predictions for the same images, with their names
    for run, name in zip(runs, names, strict=True):
        if run.predictions is not None:
            same_images = next((group for group in groups if _are_comparable(group[0][0], run)), None)
            groups.append([(run, name)]) if same_images is None else same_images.append((run, name))
    comparisons: dict[tuple[str, str], PairedComparison] = {}
    for group in groups:
        for (first_run, first), (second_run, second) in itertools.combinations(group, 2):
            if first_run.predictions is not None and second_run.predictions is not None:
                comparisons[first, second] = first_run.predictions.compare(second_run.predictions)
    levels = holm_levels({pair: paired.p_value for pair, paired in comparisons.items()})
    return RunComparison(
        runs=tuple(runs),
        names=tuple(names),
        differences=_find_differences(runs),
        pairs=tuple(
            RunPair(first=first, second=second, paired=paired, level=levels[first, second])
            for (first, second), paired in comparisons.items()
        ),
        groups=tuple(f"{_describe_images(group[0][0])}: {', '.join(name for _, name in group)}" for group in groups),
    )


def _find_differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the different settings with the value of each run.

    A setting of the model is compared only between runs of the families that have it.
    """
    settings = dict.fromkeys(key for run in runs for key in run.settings if key not in _NEUTRAL_SETTINGS)
    keys = [
        *(key for key in _FIRST_SETTINGS if key in settings),
        *(key for key in settings if key not in _FIRST_SETTINGS),
    ]
    differences = {}
    for key in keys:
        # A run of one of these families may lack the setting: it then uses the default.
        families = {run.family for run in runs if key in run.settings} if key.startswith("model.") else None
        values = [_get_setting(run, key) for run in runs if families is None or families & {run.family}]
        if any(value != values[0] for value in values):
            differences[key] = [_get_setting(run, key) for run in runs]
    return differences


def _get_setting(run: Run, key: str) -> Any:
    """Return a setting of a run. If the run sets epochs instead of steps, its steps are those that it planned."""
    value = run.settings.get(key)
    return run.total if key == "steps" and value is None else value


def _are_comparable(run: Run, other: Run) -> bool:
    """Return whether both runs have saved predictions for the same images with the same labels."""
    if run.predictions is None or other.predictions is None:
        return False
    return run.predictions.describe_difference(other.predictions) is None


def _describe_images(run: Run) -> str:
    predictions = run.predictions
    return "" if predictions is None else f"{predictions.data} ({predictions.split}, {len(predictions):,})"


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
