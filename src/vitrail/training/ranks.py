"""Ranks: the processes that train one model together. With a single process, all of this does nothing.

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

_COLLECTIVE = timedelta(minutes=5)  # how long ranks wait for each other: the first one may be writing a checkpoint
# Seconds before a rank may end. After the last collective, threads of gloo let go of its tensors, for which they need
# Python's lock; an interpreter that ends meanwhile aborts the process (until CPython 3.14): 4 of 42 runs on a busy
# machine did.
_LETTING_GO = 0.5
_LEAVING = 25.0  # seconds that a rank may take to leave after SIGTERM; torchrun kills it after 30


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def reduce_max(self, *numbers: float) -> list[float]:
        """The largest of each number over all ranks."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def reduce_sum(self, *numbers: float) -> list[float]:
        """The sum of each number over all ranks."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def _reduce(self, numbers: tuple[float, ...], how: Any) -> list[float]:
        if self.count == 1:
            return list(numbers)
        together = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, how)
        return together.tolist()

    def broadcast(self, thing: Any) -> Any:
        """The value of the first rank, on all ranks."""
        if self.count == 1:
            return thing
        things = [thing]
        dist.broadcast_object_list(things, src=0)
        return things[0]

    def run_on_first(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the first rank and return its result, or raise its error, on all ranks."""
        if self.count == 1:
            return work()
        result, problem = None, None
        if self.is_first:
            try:
                result = work()
            except VitrailError as error:
                problem = (UsageError if isinstance(error, UsageError) else VitrailError, str(error), error.exit_code)
        result, problem = self.broadcast((result, problem))
        if problem:
            kind, message, exit_code = problem
            error = kind(message)
            error.exit_code = exit_code
            raise error
        return result

    def gather(self, thing: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        dist.all_gather_object(things, thing)
        return things


@contextmanager
def join(device: str) -> Generator[Ranks]:
    """Join the ranks that torchrun started, or return a single rank."""
    count = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    place = find_device(device)
    if count == 1:
        yield Ranks(0, 1, place)
        return
    if device == "auto" and place.type != "cuda":  # gloo, which connects ranks without CUDA, moves tensors of the CPU
        place = torch.device("cpu")
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    with exit_on_sigterm():
        try:
            _connect("nccl" if place.type == "cuda" else "gloo")
            yield Ranks(dist.get_rank(), count, place)
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                raise
            raise VitrailError("Another rank has ended or cannot be reached; see its own error message.") from None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            time.sleep(_LETTING_GO)


def _connect(backend: str) -> None:
    """Initialise the process group. torchrun on one machine keeps its store across restarts, with the addresses of the
    dead ranks, so each start uses its own prefix."""
    store, rank, count = next(rendezvous("env://", timeout=_COLLECTIVE))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":  # machines count their starts each for itself
        store = dist.PrefixStore(f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=_COLLECTIVE)


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """Context in which this process ends soon after SIGTERM, even in a blocking call.

    Python's signal handlers run between bytecodes of the main thread, which may be blocked in a collective with a dead
    rank. The number of a signal is written to a pipe at once and read by another thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reading,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)


def _watch(signals: int) -> None:
    deadline = None
    while select.select([signals], [], [], None if deadline is None else max(deadline - time.monotonic(), 0))[0]:
        numbers = os.read(signals, 64)
        if not numbers:  # the block has ended
            os.close(signals)
            return
        if signal.SIGTERM in numbers and deadline is None:
            deadline = time.monotonic() + _LEAVING
    os.write(2, b"vitrail: stopped by SIGTERM while waiting for other ranks; --resume auto goes on\n")
    os._exit(128 + signal.SIGTERM)
