"""Load the images of batches in the threads of a loader process.

Reading a file, decoding it and resizing it release the GIL, so threads load as fast as DataLoader workers do, with the
memory of one of them. `engine.data.pipelines.loader` runs a `ThreadedBatches` in each loader process of a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch
from torch.utils.data import IterableDataset, get_worker_info

from engine.data.limits import BATCHES_IN_PROGRESS
from engine.data.pipelines.batch import Batch, BatchDataset
from engine.data.pipelines.batch_buffers import BatchBuffers, SentBatch
from engine.data.sampler import BatchRequest
from engine.data.sources.encoded import EncodedSource
from engine.utils.threads import CancellingPool


class ThreadedBatches(IterableDataset[SentBatch]):
    """The batches of all requests in order. Iterate over it in a loader process; `buffers` receives them in the rank.

    Of several loader processes, each loads every n-th batch, as torch's DataLoader receives them, with its share of
    the `threads`.
    """

    def __init__(
        self,
        source: EncodedSource,
        dataset: BatchDataset,
        requests: Iterable[BatchRequest],
        threads: int,
        buffers: BatchBuffers,
    ) -> None:
        self._source, self._dataset, self._requests, self._threads = source, dataset, requests, threads
        self._buffers = buffers

    def __iter__(self) -> Iterator[SentBatch]:
        worker = get_worker_info()
        process, processes = (0, 1) if worker is None else (worker.id, worker.num_workers)
        threads = max((self._threads + processes - 1 - process) // processes, 1)
        in_progress: deque[_PendingBatch] = deque()
        with CancellingPool(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for request in islice(self._requests, process, None, processes):
                in_progress.append(_PendingBatch(self._source, self._dataset, request, self._buffers, process, pool))
                if len(in_progress) == BATCHES_IN_PROGRESS:
                    yield self._finish(in_progress.popleft())
            while in_progress:
                yield self._finish(in_progress.popleft())

    def _finish(self, pending: _PendingBatch) -> SentBatch:
        return self._buffers.send(pending.result(), pending.images)


class _PendingBatch:
    """A batch whose images are decoded to a buffer of a process by the threads of a pool."""

    def __init__(
        self,
        source: EncodedSource,
        dataset: BatchDataset,
        request: BatchRequest,
        buffers: BatchBuffers,
        process: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.request = request
        self._source, self._dataset, crop = source, dataset, dataset.crop_spec(request)
        size = source.format.val_size if crop is None else crop.size
        indices = request.indices.tolist()
        self.images = buffers.new_images(process, len(indices), source.format.channels, size)
        rows = self.images.pixels.numpy()
        self._loaded = [
            pool.submit(source.load_into, pixels, request.part, index, crop)
            for pixels, index in zip(rows, indices, strict=True)
        ]

    def result(self) -> Batch:
        """Wait for all images, and return the batch. Raises the error of the first image that failed."""
        results = [(row, future.exception()) for row, future in enumerate(self._loaded)]
        errors = {row: error for row, error in results if isinstance(error, Exception)}
        labels = self._source.get_labels(self.request.part)[self.request.indices]
        return self._dataset.finish(self.request, self.images.pixels, labels, errors)
