"""Load the images of batches in the threads of a loader process.

Reading a file, decoding it and resizing it release the GIL, so threads load as fast as DataLoader workers do, with the
memory of one of them. `engine.data.pipelines.loader` runs a `ThreadedBatches` in each loader process of a rank.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from torch.utils.data import IterableDataset

from engine.data.limits import BATCHES_IN_PROGRESS
from engine.data.pipelines.batch import Batch, BatchDataset
from engine.data.pipelines.batch_buffers import BatchBuffers, SentBatch
from engine.data.pipelines.thread_count import ThreadCount
from engine.data.sampler import BatchRequest
from engine.data.sources.encoded import EncodedSource
from engine.data.stage_times import LoaderCounters, stage


class ThreadedBatches(IterableDataset[SentBatch]):
    """The batches of all requests in order. Iterate over it in a loader process; `buffers` receives them in the rank.

    Of several loader processes, each loads every n-th batch, as torch's DataLoader receives them.
    """

    def __init__(
        self,
        source: EncodedSource,
        dataset: BatchDataset,
        requests: Iterable[BatchRequest],
        thread_count: ThreadCount,
        counters: LoaderCounters,
        buffers: BatchBuffers,
    ) -> None:
        self._source, self._dataset, self._requests = source, dataset, requests
        self._thread_count, self._counters, self._buffers = thread_count, counters, buffers

    def __iter__(self) -> Iterator[SentBatch]:
        process, processes = self._counters.process, self._counters.processes
        threads = DecodeThreads(self._counters)
        in_progress: deque[PendingBatch] = deque()
        for request in islice(self._requests, process, None, processes):
            threads.set_count(self._thread_count.share_of(process, processes))
            pending = PendingBatch(self._source, self._dataset, request, self._buffers, process)
            threads.submit(pending.load_row, len(request.indices))
            in_progress.append(pending)
            if len(in_progress) == BATCHES_IN_PROGRESS:
                yield self._finish(in_progress.popleft())
        while in_progress:
            yield self._finish(in_progress.popleft())

    def _finish(self, pending: PendingBatch) -> SentBatch:
        batch = pending.result()
        self._counters.add_batch(len(pending.request.indices))
        return self._buffers.send(batch, pending.images)


class DecodeThreads:
    """Daemon threads that run tasks in the order of submission. Their number may change at any time."""

    def __init__(self, counters: LoaderCounters) -> None:
        self._counters = counters
        self._changed = threading.Condition()
        self._tasks: deque[tuple[Callable[[int], None], int]] = deque()
        self._count = self._started = 0

    def set_count(self, count: int) -> None:
        """Let this many threads take tasks. Those that are too many finish their current task first."""
        if count == self._count:
            return
        with self._changed:
            self._count = count
            self._changed.notify_all()
        for number in range(self._started, count):
            threading.Thread(target=self._run, args=(number,), name=f"decode-{number}", daemon=True).start()
        self._started = max(self._started, count)

    def submit(self, load: Callable[[int], None], count: int) -> None:
        """Call `load(0)` to `load(count - 1)` in the threads. It must not raise."""
        with self._changed:
            self._tasks.extend((load, row) for row in range(count))
            self._changed.notify_all()

    def _run(self, number: int) -> None:
        torch.set_num_threads(1)
        while True:
            with self._changed:
                while number >= self._count or not self._tasks:
                    self._changed.wait()
                load, row = self._tasks.popleft()
            started = time.perf_counter()
            load(row)
            self._counters.add_busy_seconds(time.perf_counter() - started)
            # Frees the batch while this thread waits.
            del load


class PendingBatch:
    """A batch whose images `load_row` decodes to a buffer of a process, in any order and in any thread."""

    def __init__(
        self,
        source: EncodedSource,
        dataset: BatchDataset,
        request: BatchRequest,
        buffers: BatchBuffers,
        process: int,
    ) -> None:
        self.request = request
        self._source, self._dataset, self._crop = source, dataset, dataset.crop_spec(request)
        size = source.format.val_size if self._crop is None else self._crop.size
        self._indices = request.indices.tolist()
        with stage("collate"):
            self.images = buffers.new_images(process, len(self._indices), source.format.channels, size)
        self._rows = self.images.pixels.numpy()
        self._errors: dict[int, Exception] = {}
        self._missing = len(self._indices)
        self._changed = threading.Condition()

    def load_row(self, row: int) -> None:
        """Load one image of the request."""
        error = None
        try:
            self._source.load_into(self._rows[row], self.request.part, self._indices[row], self._crop)
        except Exception as caught:
            error = caught
        with self._changed:
            if error is not None:
                self._errors[row] = error
            self._missing -= 1
            if self._missing == 0:
                self._changed.notify()

    def result(self) -> Batch:
        """Wait for all images, and return the batch. Raises the error of the first image that failed."""
        with self._changed:
            while self._missing:
                self._changed.wait()
        return self._dataset.finish_rows(self._source, self.request, self.images.pixels, self._errors)
