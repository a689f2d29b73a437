"""Thread pools."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class CancellingPool(ThreadPoolExecutor):
    """A thread pool that drops the tasks that are still queued when its context ends: Ctrl-C must not wait for them."""

    def __exit__(self, *_: object) -> None:
        self.shutdown(cancel_futures=True)
