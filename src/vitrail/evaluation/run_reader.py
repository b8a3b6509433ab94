"""What a run left in its folder."""

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
from vitrail.evaluation.predictions.saved_predictions import PREDICTIONS_FILE as ANSWERS
from vitrail.evaluation.predictions.saved_predictions import SavedPredictions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run, finished or not."""

    folder: Path
    settings: dict[str, Any]
    """All settings by name; those of tables as `augment.flip`."""
    events: Events
    answers: SavedPredictions | None
    """Answers to its test or held-out images, if they were kept."""

    @property
    def model(self) -> str:
        """The name of its model, or of its family."""
        return str(self.settings.get("model.name") or self.family)

    @property
    def result(self) -> str:
        """Its model, and whether only the head of that was trained."""
        return f"{self.model}, {LINEAR_HEAD}" if keeps_linear_head(self.events) else self.model

    @property
    def family(self) -> str:
        """The family of its model."""
        return str(self.settings.get("model.family", "?"))

    @property
    def data(self) -> str:
        """The data that it was trained on."""
        return str(self.settings.get("data", "?"))

    @property
    def final(self) -> dict[str, Any] | None:
        """Its scores at the end: `split`, `count`, `accuracy`, `accuracy_interval`; None if it has none."""
        for event in reversed(select_events(self.events, "final")):
            ends = event.get("accuracy_interval")
            numbers = (event.get("accuracy"), event.get("count"), *(ends if isinstance(ends, list) else [None]))
            if len(numbers) == 4 and all(map(is_number, numbers)):
                return event
        return None

    @property
    def step(self) -> int:
        """The last step that it recorded."""
        return max((event["step"] for event in self.events if is_number(event.get("step"))), default=0)

    @property
    def total(self) -> int | None:
        """The steps that it planned; None if it recorded none."""
        return next((event["total"] for event in self.events if is_number(event.get("total"))), None)

    @property
    def seconds(self) -> float | None:
        """Seconds from its start to its end, or to the last that it recorded."""
        known = [event["seconds"] for event in self.events if is_number(event.get("seconds"))]
        return known[-1] if known else None

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end."""
        return bool(select_events(self.events, "end"))

    @property
    def lacks_answers(self) -> bool:
        """Whether it has scores but no `answers.npz`, as runs of older versions."""
        return self.answers is None and self.final is not None

    @property
    def keeping_command(self) -> str | None:
        """The command that makes its `answers.npz`; None if only the run itself can, which held images out."""
        if self.final is None or self.final.get("split") not in ("test", "val"):
            return None
        words = ["vitrail", "evaluate", str(self.folder / "bundle"), self.data, "--output"]
        return shlex.join([*words, str(self.folder / ANSWERS)])


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The folders of runs: those given, and those directly inside of given folders that are none."""
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        if is_run(path):
            found.append(path)
            continue
        if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for names that no folder can have
            fault = "which is a file" if os.path.exists(path) else "which does not exist"  # noqa: PTH110 - the same
            raise UsageError(f"Run must be a folder that train or finetune wrote, got {str(path)!r}, {fault}.")
        inside = sorted(one for one in path.iterdir() if is_run(one))
        if not inside:
            raise UsageError(f"Run must be a folder that train or finetune wrote, or hold such, got {str(path)!r}.")
        found += inside
    unique = {os.path.realpath(path): path for path in reversed(found)}
    return list(reversed(unique.values()))


def read_run(folder: Path) -> Run:
    """Read a run: its settings, its course, its answers."""
    config, metrics, answers = folder / "config.toml", folder / "metrics.jsonl", folder / ANSWERS
    try:
        settings = dict(_flat(tomllib.loads(read_small_file(config).decode())))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(path=config, cause=f"cannot be read as TOML ({error})") from None
    try:
        events = read_events(metrics) if metrics.is_file() else []
    except OSError as error:
        raise CorruptFileError(path=metrics, cause=f"cannot be read ({error.strerror})") from None
    kept = SavedPredictions.read(answers) if answers.is_file() else None
    return Run(folder=folder, settings=settings, events=events, answers=kept)


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def short_names(runs: Sequence[Run]) -> list[str]:
    """What tells the runs apart: their models, otherwise the names of their folders, otherwise their paths."""
    paths = [str(run.folder) for run in runs]
    for names in ([run.model for run in runs], [os.path.basename(os.path.abspath(path)) for path in paths]):  # noqa: PTH100, PTH119
        if len(set(names)) == len(names):
            return names
    return paths
