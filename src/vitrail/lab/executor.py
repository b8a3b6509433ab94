"""Runs cells side by side with joblib: processes of one thread each, so that bits agree wherever a cell runs.

A worker that dies loses its cell alone: what the others finished is kept, and the cell is run again.
"""

import contextlib
import functools
import warnings
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail.core.errors import UsageError, VitrailError
from vitrail.core.optional import need
from vitrail.core.registry import load_object
from vitrail.lab.hardware import here
from vitrail.lab.images import Images, restore
from vitrail.lab.trial import Cell

BACKENDS = ("loky", "dask")
_ATTEMPTS = 3


def run_cells(folder: Path, cells: Sequence[Cell], *, jobs: int, backend: str) -> Iterator[dict[str, Any]]:
    """The records of all cells, in the order in which they finish."""
    joblib = _joblib()
    left = {cell.key(_images(folder).fingerprint): cell for cell in cells}
    if jobs == 1 and backend == "loky":
        with _one_thread():
            yield from (run_cell(str(folder), cell.to_json()) for cell in left.values())
        return
    with _connected(backend, jobs):
        for attempt in range(_ATTEMPTS):
            calls = [joblib.delayed(run_cell)(str(folder), cell.to_json()) for cell in left.values()]
            try:
                with joblib.parallel_config(backend, n_jobs=jobs), warnings.catch_warnings():
                    # loky replaces a process whose memory has grown; no cell is lost
                    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given")
                    for record in joblib.Parallel(return_as="generator_unordered", pre_dispatch="2*n_jobs")(calls):
                        del left[record["key"]]
                        yield record
                return
            except VitrailError:
                raise
            except Exception as error:  # a lost worker: loky, Dask and others each have an error for it
                if attempt == _ATTEMPTS - 1 or not _is_loss(error):
                    raise


def check_backend(backend: str) -> None:
    """Whether joblib is there and knows a backend of this name, told before anything is run."""
    joblib = _joblib()
    if backend in BACKENDS:
        return
    try:
        with joblib.parallel_config(backend):
            pass
    except (ValueError, ImportError):
        raise UsageError(
            f"Backend must be {' or '.join(BACKENDS)}, or one that is registered with joblib, got {backend!r}."
        ) from None


def run_cell(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    """One cell, in whatever process this is."""
    cell, images = Cell.from_json(fields), _images(Path(folder))
    cells = Path(folder) / "cells"
    of = [cells / part.key(images.fingerprint) for part in cell.of]
    key = cell.key(images.fingerprint)
    with _one_thread():
        result, measured = load_object(cell.task)(cell.settings, images, of, cells / key)
    return {"key": key, "cell": fields, "result": result, "measured": measured, "machine": here()}


@functools.lru_cache(1)
def _images(folder: Path) -> Images:
    return restore(folder / "images")


@contextlib.contextmanager
def _one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_loss(error: Exception) -> bool:
    return type(error).__name__ in ("TerminatedWorkerError", "BrokenProcessPool", "KilledWorker")


def _joblib() -> Any:
    return need("joblib", extra="lab", subject="vitrail compare")


@contextlib.contextmanager
def _connected(backend: str, jobs: int) -> Generator[None]:
    """Dask needs a client: of the cluster that its own configuration names, else of processes on this machine."""
    if backend not in BACKENDS:
        yield  # registered with joblib by another package
        return
    if backend == "loky":
        yield
        return
    client_of = need("distributed", extra="dask", subject="Backend dask").Client
    config = need("dask.config", extra="dask", subject="Backend dask")
    address = config.get("scheduler-address", None)
    try:
        client = (
            client_of(address) if address else client_of(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
        )
    except OSError as error:
        raise UsageError(f"Dask's scheduler must answer, got {address!r} ({error}).") from None
    with client:
        yield
