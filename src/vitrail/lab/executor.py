"""Run trials in parallel with joblib, one thread per process, so that the bits of a result do not depend on the worker.

If a worker dies, only its trial is lost: finished results are kept, and the trial is run again.
"""

import contextlib
import functools
import warnings
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail.core.errors import UsageError, VitrailError
from vitrail.core.optional import import_extra
from vitrail.core.registry import load_object
from vitrail.lab.hardware import machine_name
from vitrail.lab.images import Images, restore
from vitrail.lab.trial import Trial

BACKENDS = ("loky", "dask")
_MAX_ATTEMPTS = 3


def run_trials(folder: Path, trials: Sequence[Trial], *, jobs: int, backend: str) -> Iterator[dict[str, Any]]:
    """Run trials and yield their records in the order in which they finish."""
    joblib = _import_joblib()
    remaining = {trial.trial_id(_load_images(folder).fingerprint): trial for trial in trials}
    if jobs == 1 and backend == "loky":
        with _single_thread():
            yield from (run_trial(str(folder), trial.to_json()) for trial in remaining.values())
        return
    with _connect_backend(backend, jobs):
        for attempt in range(_MAX_ATTEMPTS):
            calls = [joblib.delayed(run_trial)(str(folder), trial.to_json()) for trial in remaining.values()]
            try:
                with joblib.parallel_config(backend, n_jobs=jobs), warnings.catch_warnings():
                    # loky replaces a process whose memory has grown; no trial is lost
                    warnings.filterwarnings("ignore", "A worker stopped while some jobs were given")
                    for record in joblib.Parallel(return_as="generator_unordered", pre_dispatch="2*n_jobs")(calls):
                        del remaining[record["key"]]
                        yield record
                return
            except VitrailError:
                raise
            except Exception as error:  # a lost worker: loky and Dask raise different errors for it
                if attempt == _MAX_ATTEMPTS - 1 or not _is_lost_worker(error):
                    raise


def check_backend(backend: str) -> None:
    """Raise an error if joblib is missing or does not know this backend."""
    joblib = _import_joblib()
    if backend in BACKENDS:
        return
    try:
        with joblib.parallel_config(backend):
            pass
    except (ValueError, ImportError):
        raise UsageError(
            f"Backend must be {' or '.join(BACKENDS)}, or a backend registered with joblib, got {backend!r}."
        ) from None


def run_trial(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Run one trial in the current process and return its record."""
    trial, images = Trial.from_json(fields), _load_images(Path(folder))
    folders = Path(folder) / "cells"
    bundles = [folders / part.trial_id(images.fingerprint) for part in trial.inputs]
    key = trial.trial_id(images.fingerprint)
    with _single_thread():
        result, measured = load_object(trial.task)(trial.settings, images, bundles, folders / key)
    return {"key": key, "cell": fields, "result": result, "measured": measured, "machine": machine_name()}


@functools.lru_cache(1)
def _load_images(folder: Path) -> Images:
    return restore(folder / "images")


@contextlib.contextmanager
def _single_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_lost_worker(error: Exception) -> bool:
    return type(error).__name__ in ("TerminatedWorkerError", "BrokenProcessPool", "KilledWorker")


def _import_joblib() -> Any:
    return import_extra("joblib", extra="lab", subject="vitrail compare")


@contextlib.contextmanager
def _connect_backend(backend: str, jobs: int) -> Generator[None]:
    """Connect to the cluster in Dask's configuration, or start workers here. Other backends need no client."""
    if backend not in BACKENDS:
        yield  # registered with joblib by another package
        return
    if backend == "loky":
        yield
        return
    client_type = import_extra("distributed", extra="dask", subject="Backend dask").Client
    config = import_extra("dask.config", extra="dask", subject="Backend dask")
    address = config.get("scheduler-address", None)
    try:
        client = (
            client_type(address)
            if address
            else client_type(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
        )
    except OSError as error:
        raise UsageError(f"Dask's scheduler must be reachable, got {address!r} ({error}).") from None
    with client:
        yield
