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
from engine.data.pipelines.batch import Batch, BatchDataset, PendingBatch
from engine.data.pipelines.batch_buffers import BatchBuffers, SentBatch
from engine.data.pipelines.choose_decoder import DecoderSwitch
from engine.data.pipelines.encoded_batch import PendingEncodedBatch
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
        decoder: DecoderSwitch | None = None,
    ) -> None:
        self._source, self._dataset, self._requests = source, dataset, requests
        self._thread_count, self._counters, self._buffers = thread_count, counters, buffers
        self._decoder = decoder or DecoderSwitch("cpu")

    def __iter__(self) -> Iterator[SentBatch]:
        process, processes = self._counters.process, self._counters.processes
        threads = DecodeThreads(self._counters)
        in_progress: deque[PendingPixels | PendingEncodedBatch] = deque()
        for_gpu = self._decoder.wait() == "gpu"
        for request in islice(self._requests, process, None, processes):
            threads.set_count(self._thread_count.share_of(process, processes))
            pending = (
                PendingEncodedBatch(self._source, self._dataset, request)
                if for_gpu
                else PendingPixels(self._source, self._dataset, request, self._buffers, process)
            )
            threads.submit(pending.load_row, len(request.indices))
            in_progress.append(pending)
            if len(in_progress) == BATCHES_IN_PROGRESS:
                yield self._finish(in_progress.popleft())
        while in_progress:
            yield self._finish(in_progress.popleft())

    def _finish(self, pending: PendingPixels | PendingEncodedBatch) -> SentBatch:
        batch = pending.result()
        self._counters.add_batch(len(pending.request.indices))
        if isinstance(pending, PendingEncodedBatch):
            return SentBatch(batch)
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


class PendingPixels(PendingBatch):
    """A batch that is decoded to a buffer of a process."""

    def __init__(
        self,
        source: EncodedSource,
        dataset: BatchDataset,
        request: BatchRequest,
        buffers: BatchBuffers,
        process: int,
    ) -> None:
        super().__init__(source, dataset, request)
        with stage("collate"):
            self.images = buffers.new_images(process, len(request.indices), source.format.channels, self._size)
        self._rows = self.images.pixels.numpy()

    def _load(self, row: int) -> None:
        self._source.load_into(self._rows[row], self.request.part, self._indices[row], self._crop)

    def _finish(self) -> Batch:
        return self._dataset.finish_rows(self._source, self.request, self.images.pixels, self._errors)
