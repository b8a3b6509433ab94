"""Resume a run from its newest intact checkpoint."""

from pathlib import Path
from typing import Any

from vitrail.core.errors import UsageError, VitrailError
from vitrail.training.checkpoint import Checkpoint, load_newest, rename_corrupt_checkpoints
from vitrail.training.loop import Trainer
from vitrail.training.run_state import read_state
from vitrail.training.trainer_checkpoint import restore_trainer


def resume(trainer: Trainer, folder: Path, fixed_settings: dict[str, Any]) -> tuple[Checkpoint | None, list[str]]:
    """Restore the trainer from the newest intact checkpoint of the run in `folder`.

    Return the checkpoint (None if the run has none) and a message for each newer corrupt one, which is renamed. Raise
    UsageError if a setting of `fixed_settings` differs from that of the checkpoint.
    """
    checkpoint, errors = load_newest(folder / "checkpoints")
    steps = trainer.ranks.gather(checkpoint.step if checkpoint else 0)
    if len(set(steps)) > 1:
        raise UsageError(
            f"RUN must be one folder that all ranks see, got checkpoints of steps {', '.join(map(str, steps))}."
        )
    if checkpoint is None:
        if errors:
            raise VitrailError(f"No checkpoint in {str(folder / 'checkpoints')!r} is intact: {errors.popitem()[1]}")
        return None, []
    checkpoint = checkpoint._replace(state=read_state(checkpoint.state))
    for name, value in fixed_settings.items():
        if (before := checkpoint.state[name]) != value:
            raise UsageError(
                f"Resumed run must have the {name} that it started with, got {_describe_difference(before, value)}."
                " Choose another output folder to start a new run."
            )
    restore_trainer(trainer, checkpoint)
    if trainer.ranks.is_first:
        rename_corrupt_checkpoints(folder / "checkpoints", errors)
    return checkpoint, list(errors.values())


def _describe_difference(before: Any, now: Any) -> str:
    """Describe how a setting of a run differs from that of its checkpoint; of tables, the first three keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        return "; ".join(f"{key} {_describe_difference(before.get(key), now.get(key))}" for key in changed[:3])
    return f"{now!r} after {before!r}"
