"""Resume a run from its newest intact checkpoint, or describe how to train the bundle of a finished run further."""

import shlex
from pathlib import Path
from typing import Any

from vitrail.core.errors import UsageError, VitrailError
from vitrail.core.files import MANIFEST
from vitrail.training.checkpoint import Checkpoint, load_newest, rename_corrupt_checkpoints
from vitrail.training.loop import Trainer
from vitrail.training.recipe import LENGTHS
from vitrail.training.run_state import read_state
from vitrail.training.trainer_checkpoint import restore_trainer


def resume(
    trainer: Trainer, folder: Path, fixed_settings: dict[str, Any], data: str = "DATA"
) -> tuple[Checkpoint | None, list[str]]:
    """Restore the trainer from the newest intact checkpoint of the run in `folder`.

    Return the checkpoint (None if the run has none) and a message for each newer corrupt one, which is renamed. Raise
    UsageError if a setting of `fixed_settings` differs from that of the checkpoint. `data` is DATA in its message, as a
    shell reads it.
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
            if name == "recipe" and (difference := _describe_length_difference(before, value)):
                raise UsageError(
                    f"Resumed run must have the length that it started with, got {difference}."
                    f" {_advise_on_more_training(trainer, folder, data)}"
                )
            raise UsageError(
                f"Resumed run must have the {name} that it started with, got {_describe_difference(before, value)}."
                " Choose another output folder to start a new run."
            )
    restore_trainer(trainer, checkpoint)
    if trainer.ranks.is_first:
        rename_corrupt_checkpoints(folder / "checkpoints", errors)
    return checkpoint, list(errors.values())


def describe_resumption(trainer: Trainer, folder: Path, data: str) -> str:
    """Describe from which step the run in `folder` continues, or how to train it further if no step is left."""
    progress = f"after step {trainer.step} of {trainer.total}"
    if trainer.stopped is not None:
        progress = f"stopped by {trainer.stopped} {progress}; there are no more steps to train."
    elif trainer.step < trainer.total:
        return f"resuming {progress}"
    else:
        progress = f"resuming {progress}; there are no more steps to train."
    return f"{progress} {_advise_on_more_training(trainer, folder, data)}"


def _advise_on_more_training(trainer: Trainer, folder: Path, data: str) -> str:
    """Return a sentence with the command that trains the bundle of the run in `folder` further."""
    if not trainer.objective.next_command:
        return "To train longer, start a new run with more --epochs or --steps in another output folder."
    bundle, is_finished = folder / "bundle", (folder / "bundle" / MANIFEST).exists()
    command = trainer.objective.next_command.format(bundle=shlex.quote(str(bundle)), data=data)
    return f"To train on{'' if is_finished else ' after its end'}: {command}"


def _describe_length_difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the difference of two recipes if they differ only in their length; otherwise return an empty string."""
    changed = {key for key in (*before, *now) if before.get(key) != now.get(key)}
    if not changed <= {*LENGTHS, "least_images"}:
        return ""
    lengths = [" ".join(f"{key} {recipe[key]}" for key in LENGTHS if recipe[key]) for recipe in (now, before)]
    return f"{lengths[0]} after {lengths[1]}"


def _describe_difference(before: Any, now: Any) -> str:
    """Describe how a setting of a run differs from that of its checkpoint; of tables, the first three keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        return "; ".join(f"{key} {_describe_difference(before.get(key), now.get(key))}" for key in changed[:3])
    return f"{now!r} after {before!r}"
