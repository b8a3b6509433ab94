"""Many processes that train one model: who I am, what we agree on. Alone, all of it costs nothing.

`torchrun --nproc-per-node 2 -m vitrail train ...` starts them; gloo connects CPUs, nccl GPUs.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from vitrail.errors import VitrailError
from vitrail.models.device import find_device


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def largest(self, *numbers: float) -> list[float]:
        """The largest of each number over all ranks."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def total(self, *numbers: float) -> list[float]:
        """The sum of each number over all ranks."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def _reduce(self, numbers: tuple[float, ...], how: Any) -> list[float]:
        if self.count == 1:
            return list(numbers)
        together = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, how)
        return together.tolist()

    def from_first(self, thing: Any) -> Any:
        """What the first rank has, for all."""
        if self.count == 1:
            return thing
        things = [thing]
        dist.broadcast_object_list(things, src=0)
        return things[0]

    def first_does(self, work: Callable[[], Any]) -> Any:
        """What the first rank's work returns, for all; its error is everybody's."""
        result, problem = None, None
        if self.is_first:
            try:
                result = work()
            except VitrailError as error:
                problem = (str(error), error.exit_code)
        result, problem = self.from_first((result, problem))
        if problem:
            error = VitrailError(problem[0])
            error.exit_code = problem[1]
            raise error
        return result

    def gather(self, thing: Any) -> list[Any]:
        """What every rank has, for all."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        dist.all_gather_object(things, thing)
        return things


@contextmanager
def join(device: str) -> Generator[Ranks]:
    """Join the ranks that torchrun started, or be alone."""
    count = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1
    place = find_device(device)
    if count == 1:
        yield Ranks(0, 1, place)
        return
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    try:
        yield Ranks(dist.get_rank(), count, place)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise VitrailError("Another rank has left; its own message says why.") from None
    finally:
        dist.destroy_process_group()
