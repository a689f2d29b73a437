"""The next item of an iterator is made by a thread while the one before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """The items in their order, no more than one of them ahead. The thread is started when the first is asked for, and
    ends with the items, or with what is raised in place of one, which is raised here from then on; or else with the
    process."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._made: Queue[T | BaseException] = Queue(1)
        self._end: BaseException | None = None
        self._thread: Thread | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is not None:
            raise self._end
        if self._thread is None:
            self._thread = Thread(target=self._make, name="next batch", daemon=True)
            self._thread.start()
        item = self._made.get()
        if isinstance(item, BaseException):
            self._end = item
            raise item
        self._made.task_done()
        return item

    def _make(self) -> None:
        try:
            for item in self._items:
                self._made.put(item)
                # Until it is taken: what is made further ahead would only take up the device's memory.
                self._made.join()
            self._made.put(StopIteration())
        except BaseException as error:
            self._made.put(error)
