"""The interface of observers of a training run.

The metrics log, the TensorBoard event file, the progress line, snapshots and the run report of `vitrail.api` are
observers. They exist on the first rank only and never change the run.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.bundles.bundle import Bundle
from vitrail.core.terminal import Say
from vitrail.data.dataset import Dataset, Split
from vitrail.models.config import ModelConfig
from vitrail.training.objectives.illustration import IllustrationArrays
from vitrail.training.objectives.judgement import Judgement


class RunProgress(NamedTuple):
    """How far a run has come."""

    step: int
    total: int
    seconds: float
    """Duration of training, including the time before interruptions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run that do not change while it trains."""

    folder: Path
    """The folder RUN, which contains `metrics.jsonl`."""
    data: tuple[str, ...]
    """Arguments of the command line that name DATA; none if DATA has no name."""
    dataset: Dataset
    command: str
    """The command or call that started the run; may be empty."""
    model: ModelConfig
    watched: str
    """Metric of an evaluation that is shown during training, between 0 and 1."""
    watched_name: str
    """English name of the metric `watched`."""
    korean: Mapping[str, str]
    """Korean translations of the texts of the objective (see `Objective.korean`)."""
    peak_learning_rate: float
    steps_per_epoch: int
    say: Say
    """Prints a line for the user."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """Results of a run that has ended."""

    bundle: Bundle
    judgement: Judgement | None
    """The final evaluation; None if there is none."""
    split: Split
    """The images of the final evaluation; the training images if there is none."""
    illustrate: Callable[[], IllustrationArrays | None]
    """Computes the illustration of the objective for some images of `split`, which may be slow."""


class Observer:
    """Base class of observers. Each method does nothing by default."""

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Called for each event, which is a line of `metrics.jsonl`. Numbers that are not finite are None."""

    def step(self, number: int) -> None:
        """Called after each step, and once before the first one, with the number of steps done."""

    def progress(self, step: int, numbers: Mapping[str, float], held_out: str) -> None:
        """Called every few steps.

        `numbers` has `loss`, `learning_rate` and `images_per_second`; `held_out` describes the latest evaluation
        ("accuracy 93.4%") and is empty before the first.
        """

    def update(self, position: RunProgress) -> None:
        """Called after evaluations and checkpoints."""

    def fail(self, position: RunProgress, error: BaseException) -> None:
        """Called when an error or a signal ends the run."""

    def finish(self, outcome: FinishedRun) -> None:
        """Called when the bundle is written."""

    def close(self) -> None:
        """Called at the end of the run, also after an error."""


ObserverFactory = Callable[[RunInfo], Observer]
"""Function that creates an observer when a run starts or resumes, for instance `reports.run_report.RunReport`."""
