"""The folder of a run: its state, its lock and its config.toml.

RUN/config.toml      all settings of the run
RUN/metrics.jsonl    a JSON line for each event
RUN/events.out.*     TensorBoard event files with the same scalars
RUN/checkpoints/     the newest checkpoints and the best one
RUN/bundle/          the model, ready to use
RUN/snapshots/       the model at log-spaced steps, with the option snapshots
RUN/answers.npz      predictions for the test or held-out images (see `evaluation.predictions.saved_predictions`)
RUN/report.html      the report
RUN/.lock            locked by the process that writes the run; contains its id and machine
"""

import contextlib
import enum
import os
import shutil
from pathlib import Path

from vitrail.core.errors import UsageError
from vitrail.core.files import MANIFEST, check_output, check_writable, file_lock, refuse_foreign, replace_text
from vitrail.core.terminal import Say
from vitrail.evaluation.history import RUN_MARK, is_run
from vitrail.training.checkpoint import list_steps, remove_temporary_folders

_LOCK = ".lock"
_TEMPORARY_CONFIG = ".config.toml.writing"  # the temporary file of `replace_text`
_CONTENT = (
    "metrics.jsonl",
    "checkpoints",
    "bundle",
    "snapshots",
    "answers.npz",
    "report.html",
    ".report.html.writing",
    "config.toml",
)  # config.toml is last: a folder without it is no longer recognised as a run


class RunFolderState(enum.Enum):
    """RunFolderState of the output folder of a run."""

    NEW = "does not exist, or is an empty folder"
    FOREIGN = "a file or folder that is not a run"
    BEGUN = "a run that was killed before its first checkpoint"
    UNDER_WAY = "a run with checkpoints and without a bundle"
    FINISHED = "a run with a bundle"

    @property
    def is_run(self) -> bool:
        """Whether the folder is a run, which can be resumed or overwritten."""
        return self not in (RunFolderState.NEW, RunFolderState.FOREIGN)


class RunFolder:
    """The output folder of a run. Call `hold` or `claim`, which lock it, before changing anything in it."""

    def __init__(self, path: str | Path, *, resumes: bool, force: bool) -> None:
        if resumes and force:
            raise UsageError(
                "A run must be resumed or overwritten, got both --resume and --force (in Python: resume=True and"
                " force=True)."
            )
        self.path, self._resumes, self._force = Path(path), resumes, force
        self.checkpoints = self.path / "checkpoints"
        self._is_locked: bool | None = None

    @property
    def state(self) -> RunFolderState:
        """The current state on disk."""
        if not self.path.is_dir():
            return RunFolderState.FOREIGN if os.path.lexists(self.path) else RunFolderState.NEW
        content = {path.name for path in self.path.iterdir()} - {_LOCK}
        if not content:
            return RunFolderState.NEW
        if (self.path / "bundle" / MANIFEST).is_file():
            return RunFolderState.FINISHED
        if not is_run(self.path) and content != {_TEMPORARY_CONFIG}:
            return RunFolderState.FOREIGN
        return RunFolderState.UNDER_WAY if list_steps(self.checkpoints) else RunFolderState.BEGUN

    @property
    def is_resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self._resumes and bool(list_steps(self.checkpoints))

    def check(self) -> None:
        """Raise UsageError for a path that this run must not or cannot write, before any work is done."""
        state = self.state
        if state is RunFolderState.NEW or (state.is_run and self._resumes):
            check_writable(self.path)
            self._check_content()
        elif state.is_run and not self._force:
            raise UsageError(
                f"Output must not exist yet, got the run {str(self.path)!r}. Resume it with --resume auto, choose"
                " another path, or overwrite it with --force (in Python: resume=True, force=True)."
            )
        elif state is RunFolderState.FOREIGN:
            raise UsageError(
                f"Output must not exist yet, or must be a run of vitrail, got {str(self.path)!r}. Choose another path,"
                " or move it away."
            )
        else:
            check_output(self.path, force=self._force)

    def _check_content(self) -> None:
        """Raise UsageError for contents that the run cannot overwrite, such as pipes or a foreign `bundle`."""
        for name in ("config.toml", "metrics.jsonl", "answers.npz", "report.html"):
            path = self.path / name
            if os.path.lexists(path) and not path.is_file():
                raise UsageError(f"Output must contain regular files, got {str(path)!r}. Move it away.")
        refuse_foreign(self.path / "bundle")

    def hold(self, stack: contextlib.ExitStack) -> None:
        """Lock the folder until `stack` closes. If another process holds the lock, the error names that process."""
        if self._is_locked is None:
            self._is_locked = stack.enter_context(file_lock(self.path / _LOCK, self._raise_in_use))

    def _raise_in_use(self, holder: str) -> None:
        raise UsageError(
            f"Output must be written by one process at a time, got {str(self.path)!r}, which {holder} is writing. Wait"
            " for it, end it, or choose another path."
        )

    def claim(self, config: str, stack: contextlib.ExitStack, say: Say) -> bool:
        """Lock the folder and prepare it for this run. Return whether the run is new.

        The folder of a run to resume stays unchanged. Otherwise, the files of an earlier run are removed, and
        config.toml is written.
        """
        self.hold(stack)
        self.check()
        if self._is_locked:
            remove_temporary_folders(self.checkpoints)
        else:
            say(
                f"note: {str(self.path)!r} is on a file system without locks. Make sure that no other process writes"
                " there."
            )
        if self._resumes and self.state.is_run:
            return False
        for path in (*self.path.glob("events.out.tfevents.*"), *(self.path / name for name in _CONTENT)):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.write_config(config)
        return True

    def write_config(self, config: str) -> None:
        """Write config.toml atomically, by which the folder is recognised as a run; create the folder if needed."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            replace_text(self.path / "config.toml", f"{RUN_MARK} {config}")
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"Output must be a folder that can be written, got {str(self.path)!r} ({error.strerror})."
            ) from None
