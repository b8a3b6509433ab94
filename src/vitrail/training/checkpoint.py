"""Checkpoints: the complete state of a run at one step, in a folder that is written atomically.

step-000000120/
  tensors.safetensors   weights, their average and the optimiser's state
  state.json            the step, scores, and the settings that a resumed run must have
  manifest.json         SHA-256 of both, written last

This module works with numpy arrays and does not import torch.
"""

import contextlib
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.core.files import atomic_folder, read_json, utf8_path, verify_checksums, write_json

_FILES = ("tensors.safetensors", "state.json")
_FOLDER_NAME = re.compile(r"step-(\d{9,})")


class Checkpoint(NamedTuple):
    """A checkpoint in memory."""

    step: int
    arrays: dict[str, np.ndarray]
    state: dict[str, Any]


def save_checkpoint(folder: Path, step: int, arrays: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a step into `folder` atomically, replacing an existing one, and return its path."""
    path = folder / f"step-{step:09d}"
    try:
        with atomic_folder(path, force=True, owned=True) as temporary:
            save_file(dict(arrays), temporary / _FILES[0])
            write_json(temporary / _FILES[1], dict(state))
    except (VitrailError, SafetensorError) as error:
        size = sum(array.nbytes for array in arrays.values())
        reason = str(error).removesuffix(".")
        raise VitrailError(f"Checkpoint {str(path)!r} of {size:,} bytes cannot be written: {reason}.") from None
    return path


def list_steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint in `folder`, intact or corrupt, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _FOLDER_NAME.fullmatch(path.name)))


def load_newest(folder: Path) -> tuple[Checkpoint | None, dict[int, str]]:
    """Return the newest intact checkpoint (None if there is none), and an error message for each newer corrupt one."""
    errors = {}
    for step in reversed(list_steps(folder)):
        try:
            return load_checkpoint(folder / f"step-{step:09d}"), errors
        except CorruptFileError as error:
            errors[step] = str(error)
    return None, errors


def rename_corrupt_checkpoints(folder: Path, steps: Iterable[int]) -> None:
    """Rename corrupt checkpoints, so that they are not read and `remove_old_checkpoints` does not count them."""
    for step in steps:
        with contextlib.suppress(OSError):
            (folder / f"step-{step:09d}").rename(folder / f"damaged-step-{step:09d}")


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its checksums. Raise CorruptFileError if a file is missing or corrupt."""
    verify_checksums(path, _FILES)
    try:
        with utf8_path(path / _FILES[0]) as file:
            arrays = load_file(file)
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(path=path / _FILES[0], cause=f"cannot be read ({error})") from None
    state = read_json(path / _FILES[1])
    return Checkpoint(state["step"], arrays, state)


def remove_old_checkpoints(folder: Path, *, keep: int, best: int | None) -> None:
    """Remove all checkpoints in `folder` except the newest `keep` and the one of step `best`."""
    steps = list_steps(folder)
    for step in steps[: -keep if keep else None]:
        if step != best:
            # Removing takes time. Rename first, so that no reader takes a half-removed folder for a checkpoint.
            renamed = folder / f".step-{step:09d}.removed"
            with contextlib.suppress(OSError):
                (folder / f"step-{step:09d}").rename(renamed)
    _remove_folders(folder.glob(".step-*.removed"))


def remove_temporary_folders(folder: Path) -> None:
    """Remove the temporary folders that killed processes left in `folder`. The caller must hold the lock of the run."""
    _remove_folders(folder.glob(".step-*"))


def _remove_folders(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
