"""The folder of a run: its state, its lock and its config.toml.

RUN/config.toml      all settings of the run
RUN/metrics.jsonl    a JSON line for each event; TensorBoard's events beside it
RUN/checkpoints/     the newest ones and the best
RUN/bundle/          the model, ready to use
RUN/snapshots/       the model at log-spaced steps, if asked for
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
_ASIDE = ".config.toml.writing"  # as `replace_text` names it
_CONTENT = (
    "metrics.jsonl",
    "checkpoints",
    "bundle",
    "snapshots",
    "answers.npz",
    "report.html",
    ".report.html.writing",
    "config.toml",
)  # the last one makes it a run


class State(enum.Enum):
    """State of a folder that a run is to be written to."""

    NEW = "there is nothing, or an empty folder"
    FOREIGN = "there is something that is no run"
    BEGUN = "a run that was killed before its first checkpoint"
    UNDER_WAY = "a run with checkpoints and without a bundle"
    FINISHED = "a run with a bundle"

    @property
    def is_run(self) -> bool:
        """Whether it is a run, which can be resumed or overwritten."""
        return self not in (State.NEW, State.FOREIGN)


class RunFolder:
    """The folder of a run. Call `hold` before changing anything in it."""

    def __init__(self, path: str | Path, *, resumes: bool, force: bool) -> None:
        if resumes and force:
            raise UsageError(
                "A run must be resumed or overwritten, got both --resume and --force (in Python: resume=True and"
                " force=True)."
            )
        self.path, self._resumes, self._force = Path(path), resumes, force
        self.checkpoints = self.path / "checkpoints"
        self._has_lock: bool | None = None

    @property
    def state(self) -> State:
        """The current state on disk."""
        if not self.path.is_dir():
            return State.FOREIGN if os.path.lexists(self.path) else State.NEW
        content = {path.name for path in self.path.iterdir()} - {_LOCK}
        if not content:
            return State.NEW
        if (self.path / "bundle" / MANIFEST).is_file():
            return State.FINISHED
        if not is_run(self.path) and content != {_ASIDE}:
            return State.FOREIGN
        return State.UNDER_WAY if list_steps(self.checkpoints) else State.BEGUN

    @property
    def goes_on(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self._resumes and bool(list_steps(self.checkpoints))

    def check(self) -> None:
        """Refuse a path that this run may not write, before any work is done."""
        state = self.state
        if state is State.NEW or (state.is_run and self._resumes):
            check_writable(self.path)
            self._check_content()
        elif state.is_run and not self._force:
            raise UsageError(
                f"Output must not exist yet, got the run {str(self.path)!r}. Go on with it by --resume auto, choose"
                " another path, or overwrite it with --force (in Python: resume=True, force=True)."
            )
        elif state is State.FOREIGN:
            raise UsageError(
                f"Output must not exist yet, or must be a run of vitrail, got {str(self.path)!r}. Choose another path,"
                " or move it away yourself."
            )
        else:
            check_output(self.path, force=self._force)

    def _check_content(self) -> None:
        """Refuse what the end of a run could not write: pipes and the like, a bundle that is not ours."""
        for name in ("config.toml", "metrics.jsonl", "answers.npz", "report.html"):
            path = self.path / name
            if os.path.lexists(path) and not path.is_file():
                raise UsageError(f"Output must contain regular files, got {str(path)!r}. Move it away yourself.")
        refuse_foreign(self.path / "bundle")

    def hold(self, stack: contextlib.ExitStack) -> None:
        """Lock the folder until `stack` ends. If another process holds it, the error names that process."""
        if self._has_lock is None:
            self._has_lock = stack.enter_context(file_lock(self.path / _LOCK, self._refuse))

    def _refuse(self, holder: str) -> None:
        raise UsageError(
            f"Output must be written by one process at a time, got {str(self.path)!r}, which {holder} is writing. Wait"
            " for it, end it, or choose another path."
        )

    def claim(self, config: str, stack: contextlib.ExitStack, say: Say) -> bool:
        """Prepare the folder for this run: empty, or unchanged if the run resumes. Returns whether it is new."""
        self.hold(stack)
        self.check()
        if self._has_lock:
            remove_temporary_folders(self.checkpoints)
        else:
            say(f"note: {str(self.path)!r} is on a file system without locks: no other process may write there")
        if self._resumes and self.state.is_run:
            return False
        for path in (*self.path.glob("events.out.tfevents.*"), *(self.path / name for name in _CONTENT)):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.write_config(config)
        return True

    def write_config(self, config: str) -> None:
        """Write config.toml atomically; a folder is a run if it has one."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            replace_text(self.path / "config.toml", f"{RUN_MARK} {config}")
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"Output must be a folder that can be written, got {str(self.path)!r} ({error.strerror})."
            ) from None
