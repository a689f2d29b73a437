"""Thread pools, and threads of their own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class CancellingPool(ThreadPoolExecutor):
    """A thread pool that drops the tasks that are still queued when its context ends: Ctrl-C must not wait for them."""

    def __exit__(self, *_: object) -> None:
        self.shutdown(cancel_futures=True)


def map_ahead(
    pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """Yield the result for each item in order, with at most `ahead` results that wait: `Executor.map` has no bound."""
    futures: deque[Future[Result]] = deque()
    for item in items:
        futures.append(pool.submit(function, item))
        if len(futures) >= ahead:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield the result for each item in order, computed by so many threads."""
    with CancellingPool(threads) as pool:
        yield from map_ahead(pool, function, items, 2 * threads)


def in_background(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a thread that does not keep this process from ending, unlike those of a pool."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
