"""Convert an untrusted pickle in the sandbox: a child process without network (`child.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vitrail.core.errors import CorruptFileError, VitrailError
from vitrail.core.memory import available_memory, check_unpacked_size
from vitrail.core.sandbox import child

_TIME_LIMIT = 600  # seconds for a pickle


def convert_pickle(reader: Path, source: Path, target: Path, *, expected: str, name: str | Path = "") -> dict[str, Any]:
    """Convert the pickle `source` to the file `target` in the sandbox, and return the report of the reader.

    `reader` is a Python file with the functions that `child.py` calls. Raise CorruptFileError if the reader refuses the
    file; the error calls it `name` and says that it is not `expected`, such as "a plain state dict".
    """
    name = name or source
    if not os.access(source, os.R_OK):
        raise CorruptFileError(path=name, cause="cannot be read")
    check_unpacked_size(source.stat().st_size, Path(name))
    arguments = [str(reader), str(source.absolute()), str(target), str(available_memory()), *_search_path()]
    # The child process must not start threads.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            [sys.executable, "-I", child.__file__, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT,
            check=False,
            cwd=target.parent,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise VitrailError(f"{str(name)!r} takes longer than {_TIME_LIMIT} s to read.") from None
    reason = (
        process.stderr.strip().splitlines()[-1][:300] if process.stderr.strip() else f"exit code {process.returncode}"
    )
    if process.returncode == child.REFUSED:
        raise CorruptFileError(
            path=name, cause=f"is refused: it is not {expected} ({reason})", advice="No code in it was run."
        )
    if process.returncode:  # perhaps a full disk or lack of memory, so the file is not called corrupt
        raise VitrailError(f"{str(name)!r} cannot be read: the process that reads it ended early ({reason}).")
    return json.loads(process.stdout)


def _search_path() -> list[str]:
    """Return the folders where the child process finds packages: an isolated interpreter ignores PYTHONPATH."""
    return [folder for folder in sys.path if folder and Path(folder).is_dir()]
