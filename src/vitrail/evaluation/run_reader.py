"""Reader of run folders: settings, metrics log and saved predictions."""

import dataclasses
import os
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.core.errors import CorruptFileError, UsageError
from vitrail.core.files import read_small_file
from vitrail.evaluation.history import (
    LINEAR_HEAD,
    Events,
    is_number,
    is_run,
    keeps_linear_head,
    read_events,
    select_events,
)
from vitrail.evaluation.predictions.saved_predictions import PREDICTIONS_FILE, SavedPredictions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run folder. The run may be unfinished."""

    folder: Path
    settings: dict[str, Any]
    """All settings by name. Settings of a table have names such as `augment.flip`."""
    events: Events
    predictions: SavedPredictions | None
    """Saved predictions for its test or held-out images."""

    @property
    def model(self) -> str:
        """Name of the model, or of its family if the model has no name."""
        return str(self.settings.get("model.name") or self.family)

    @property
    def result(self) -> str:
        """Name of the model, with a remark if only its head was trained."""
        return f"{self.model}, {LINEAR_HEAD}" if keeps_linear_head(self.events) else self.model

    @property
    def family(self) -> str:
        """Family of the model."""
        return str(self.settings.get("model.family", "?"))

    @property
    def data(self) -> str:
        """Name of the training data."""
        return str(self.settings.get("data", "?"))

    @property
    def final(self) -> dict[str, Any] | None:
        """Final scores (`split`, `count`, `accuracy`, `accuracy_interval`), or None without a final accuracy."""
        for event in reversed(select_events(self.events, "final")):
            interval = event.get("accuracy_interval")
            ends = interval if isinstance(interval, list) else [None]
            numbers = (event.get("accuracy"), event.get("count"), *ends)
            if len(numbers) == 4 and all(map(is_number, numbers)):
                return event
        return None

    @property
    def step(self) -> int:
        """Last recorded step."""
        return max((event["step"] for event in self.events if is_number(event.get("step"))), default=0)

    @property
    def total(self) -> int | None:
        """Number of planned steps, or None if it was not recorded."""
        return next((event["total"] for event in self.events if is_number(event.get("total"))), None)

    @property
    def seconds(self) -> float | None:
        """Seconds from the start of the run to its end, or to the last recorded event."""
        seconds = [event["seconds"] for event in self.events if is_number(event.get("seconds"))]
        return seconds[-1] if seconds else None

    @property
    def is_finished(self) -> bool:
        """Whether the run ended."""
        return bool(select_events(self.events, "end"))

    @property
    def lacks_predictions(self) -> bool:
        """Whether the run has scores but no saved predictions (`answers.npz`), like runs of older versions."""
        return self.predictions is None and self.final is not None

    @property
    def evaluate_command(self) -> str | None:
        """The command that writes the missing `answers.npz`.

        None if only the run itself can write it, because its scores are of images that it held out.
        """
        if self.final is None or self.final.get("split") not in ("test", "val"):
            return None
        bundle, output = self.folder / "bundle", self.folder / PREDICTIONS_FILE
        return shlex.join(["vitrail", "evaluate", str(bundle), self.data, "--output", str(output)])


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of runs at these paths, each once. A path is a run or a folder with runs directly inside."""
    runs: list[Path] = []
    for path in map(Path, paths):
        if is_run(path):
            runs.append(path)
            continue
        if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for names that no folder can have
            reason = "which is a file" if os.path.exists(path) else "which does not exist"  # noqa: PTH110 - the same
            raise UsageError(f"Run must be a folder that train or finetune wrote, got {str(path)!r}, {reason}.")
        inner_runs = [folder for folder in path.iterdir() if is_run(folder)]
        if not inner_runs:
            raise UsageError(
                f"Run must be a folder that train or finetune wrote, or contain such folders, got {str(path)!r}."
            )
        runs += inner_runs
    unique = {os.path.realpath(path): path for path in reversed(runs)}
    return list(reversed(unique.values()))


def read_run(folder: Path) -> Run:
    """Read settings, metrics log and saved predictions of a run. Raises CorruptFileError if a file cannot be read."""
    config, metrics, predictions = folder / "config.toml", folder / "metrics.jsonl", folder / PREDICTIONS_FILE
    try:
        settings = dict(_flatten_tables(tomllib.loads(read_small_file(config).decode())))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(path=config, cause=f"cannot be read as TOML ({error})") from None
    try:
        events = read_events(metrics) if metrics.is_file() else []
    except OSError as error:
        raise CorruptFileError(path=metrics, cause=f"cannot be read ({error.strerror})") from None
    saved = SavedPredictions.read(predictions) if predictions.is_file() else None
    return Run(folder=folder, settings=settings, events=events, predictions=saved)


def _flatten_tables(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a TOML document, with the names of their tables as a prefix."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten_tables(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def short_names(runs: Sequence[Run]) -> list[str]:
    """Return unique names of runs: their models, otherwise the names of their folders, otherwise their paths."""
    paths = [str(run.folder) for run in runs]
    for names in ([run.model for run in runs], [os.path.basename(os.path.abspath(path)) for path in paths]):  # noqa: PTH100, PTH119
        if len(set(names)) == len(names):
            return names
    return paths
