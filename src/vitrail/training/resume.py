"""Resuming from the newest intact checkpoint of a run."""

from pathlib import Path
from typing import Any

from vitrail.core.errors import UsageError, VitrailError
from vitrail.training.checkpoint import Checkpoint, load_newest, rename_damaged
from vitrail.training.loop import Trainer
from vitrail.training.run_state import read_state
from vitrail.training.trainer_checkpoint import restore_trainer


def resume(trainer: Trainer, folder: Path, agreed: dict[str, Any]) -> tuple[Checkpoint | None, list[str]]:
    """Restore the newest intact checkpoint of `folder`, if there is one; it must have the settings of this run. Returns
    it, and a line for each newer one that is damaged."""
    checkpoint, complaints = load_newest(folder / "checkpoints")
    steps = trainer.ranks.gather(checkpoint.step if checkpoint else 0)
    if len(set(steps)) > 1:
        raise UsageError(
            f"RUN must be one folder that all ranks see, got checkpoints of steps {', '.join(map(str, steps))}."
        )
    if checkpoint is None:
        if complaints:
            raise VitrailError(f"No checkpoint in {str(folder / 'checkpoints')!r} is intact: {complaints.popitem()[1]}")
        return None, []
    checkpoint = checkpoint._replace(state=read_state(checkpoint.state))
    for name, value in agreed.items():
        if (before := checkpoint.state[name]) != value:
            raise UsageError(
                f"Resumed run must have the {name} it began with, got {_difference(before, value)}."
                " Choose another output for another run."
            )
    restore_trainer(trainer, checkpoint)
    if trainer.ranks.is_first:
        rename_damaged(folder / "checkpoints", complaints)
    return checkpoint, list(complaints.values())


def _difference(before: Any, now: Any) -> str:
    """The differences, in a few words."""
    if isinstance(before, dict) and isinstance(now, dict):
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        return "; ".join(f"{key} {_difference(before.get(key), now.get(key))}" for key in changed[:3])
    return f"{now!r} after {before!r}"
