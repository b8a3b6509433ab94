"""Snapshots: the model at log-spaced steps of a run, saved as bundles in RUN/snapshots."""

from pathlib import Path

import numpy as np

from vitrail import __version__
from vitrail.bundles.bundle import Bundle, save
from vitrail.training.loop import Trainer
from vitrail.training.observer import Observer


class Snapshots(Observer):
    """Observer that saves the kept model before the first step and after `Options.snapshots` log-spaced steps."""

    def __init__(self, trainer: Trainer, folder: Path, labels: tuple[str, ...] | None) -> None:
        self._trainer, self._folder, self._labels = trainer, folder, labels
        log_spaced = np.geomspace(1, max(trainer.total, 1), trainer.options.snapshots).round().astype(int)
        self._steps = frozenset({0, *log_spaced.tolist()})

    def step(self, number: int) -> None:
        """Save the kept model as a bundle if this step is one of those chosen at the start."""
        if number not in self._steps:
            return
        trainer = self._trainer
        provenance = {"objective": trainer.recipe.objective, "steps": number, "vitrail": __version__}
        bundle = Bundle(
            model=trainer.kept_model,
            preprocess=trainer.preprocess,
            labels=self._labels,
            provenance=provenance,
            answer=trainer.kept_objective.decision_rule(None, trainer.ranks),
        )
        save(bundle, self._folder / f"step-{number:09d}", force=True)
