"""Ranks: the processes that train one model together. With a single process, collectives return their arguments.

`torchrun --nproc-per-node 2 -m vitrail train ...` starts them; gloo connects CPUs, nccl GPUs.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vitrail.core.errors import UsageError, VitrailError
from vitrail.models.device import find_device

_COLLECTIVE_TIMEOUT = timedelta(minutes=5)  # ranks may have to wait while the first rank writes a checkpoint
# Seconds that a rank waits before it exits. After the last collective, threads of gloo release its tensors, for which
# they need the GIL. If the interpreter exits meanwhile, the process aborts (before CPython 3.14). This happened in 4 of
# 42 runs on a busy machine.
_EXIT_DELAY = 0.5
_SIGTERM_TIMEOUT = 25.0  # seconds within which a rank ends after SIGTERM; torchrun kills it after 30


class Ranks(NamedTuple):
    """This process among the ranks that train together, and its device."""

    rank: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def reduce_max(self, *numbers: float) -> list[float]:
        """Return the maximum of each number over all ranks."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def reduce_sum(self, *numbers: float) -> list[float]:
        """Return the sum of each number over all ranks."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def _reduce(self, numbers: tuple[float, ...], operation: Any) -> list[float]:
        if self.count == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()

    def broadcast(self, value: Any) -> Any:
        """Return the value of the first rank on all ranks."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def run_on_first(self, function: Callable[[], Any]) -> Any:
        """Call `function` on the first rank, and return its result or raise its VitrailError on all ranks."""
        if self.count == 1:
            return function()
        result, failure = None, None
        if self.is_first:
            try:
                result = function()
            except VitrailError as error:
                failure = (UsageError if isinstance(error, UsageError) else VitrailError, str(error), error.exit_code)
        result, failure = self.broadcast((result, failure))
        if failure:
            error_class, message, exit_code = failure
            error = error_class(message)
            error.exit_code = exit_code
            raise error
        return result

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on all ranks."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values


@contextmanager
def join_ranks(device: str) -> Generator[Ranks]:
    """Context manager that joins the ranks that torchrun started, or yields a single rank without torchrun."""
    count = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    rank_device = find_device(device)
    if count == 1:
        yield Ranks(0, 1, rank_device)
        return
    if device == "auto" and rank_device.type != "cuda":  # gloo, which connects ranks without CUDA, needs CPU tensors
        rank_device = torch.device("cpu")
    if rank_device.type == "cuda":
        rank_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(rank_device)
    with exit_on_sigterm():
        try:
            _connect("nccl" if rank_device.type == "cuda" else "gloo")
            yield Ranks(dist.get_rank(), count, rank_device)
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                raise
            raise VitrailError("Another rank has ended or cannot be reached; see its own error message.") from None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            time.sleep(_EXIT_DELAY)


def _connect(backend: str) -> None:
    """Initialise the process group.

    On one machine, torchrun keeps its store across restarts, with the addresses of ended ranks. Each start therefore
    uses its own prefix.
    """
    store, rank, count = next(rendezvous("env://", timeout=_COLLECTIVE_TIMEOUT))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # with several machines, restart counts may differ
        store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_COLLECTIVE_TIMEOUT)


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """Context manager in which this process ends soon after SIGTERM, even if it is in a blocking call.

    Signal handlers of Python run between bytecodes of the main thread, which may be blocked in a collective with a rank
    that has ended. A thread therefore reads signal numbers from a pipe, to which the interpreter writes them at once.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    previous_fd = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    threading.Thread(target=_exit_after_sigterm, args=(read_end,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        os.close(write_end)


def _exit_after_sigterm(signals: int) -> None:
    """Read signal numbers from the pipe `signals`, and exit the process some seconds after SIGTERM."""
    deadline = None
    while select.select([signals], [], [], None if deadline is None else max(deadline - time.monotonic(), 0))[0]:
        numbers = os.read(signals, 64)
        if not numbers:  # the context has ended
            os.close(signals)
            return
        if signal.SIGTERM in numbers and deadline is None:
            deadline = time.monotonic() + _SIGTERM_TIMEOUT
    os.write(2, b"vitrail: stopped by SIGTERM while waiting for other ranks; continue with --resume auto\n")
    os._exit(128 + signal.SIGTERM)
