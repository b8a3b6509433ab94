"""Prefetching: run jobs on threads in advance and return their results in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def prefetch(jobs: Iterator[Callable[[], Result]], workers: int, ahead: int) -> Generator[Result]:
    """Yield the results of the jobs in their order. Threads compute up to `ahead` results in advance."""
    if workers == 0:
        for job in jobs:
            yield job()
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="vitrail-loader")
    waiting: deque[Future[Result]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(job))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
