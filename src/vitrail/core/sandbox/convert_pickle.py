"""Untrusted pickles: a child process without network (`vitrail.core.sandbox.child`) converts one to a plain file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.core.memory import available_memory, check_unpacked_size
from vitrail.core.sandbox import child

_PATIENCE = 600  # seconds for a pickle


def convert_pickle(reader: Path, source: Path, target: Path, *, plain: str, name: str | Path = "") -> dict[str, Any]:
    """Convert the pickle `source` to the file `target` by a reader (see `child.py`); returns its report.

    Errors call the file `name`, and say that it is not `plain`, such as "a plain state dict"."""
    name = name or source
    if not os.access(source, os.R_OK):
        raise CorruptFileError(path=name, cause="cannot be read")
    check_unpacked_size(source.stat().st_size, Path(name))
    words = [str(reader), str(source.absolute()), str(target), str(available_memory()), *_search_path()]
    # One thread: the child may start no other.
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-I", child.__file__, *words],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            cwd=target.parent,
            stdin=subprocess.DEVNULL,
            env=alone,
        )
    except subprocess.TimeoutExpired:
        raise VitrailError(f"{str(name)!r} takes longer than {_PATIENCE} s to read.") from None
    reason = done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else f"exit code {done.returncode}"
    if done.returncode == child.REFUSED:
        raise CorruptFileError(
            path=name, cause=f"is refused: it is not {plain} ({reason})", advice="Nothing of it was run."
        )
    if done.returncode:  # not the file's fault, perhaps: a full disk, or no memory
        raise VitrailError(f"{str(name)!r} cannot be read: the process that did ended early ({reason}).")
    return json.loads(done.stdout)


def _search_path() -> list[str]:
    """Paths where the child process finds packages: an isolated interpreter ignores PYTHONPATH."""
    return [place for place in sys.path if place and Path(place).is_dir()]
