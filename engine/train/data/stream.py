"""Load CPU batches for batch requests: in this process, or in loader processes that are ahead of the rank.

A loader process is a DataLoader worker, which loads one batch after the other, or runs decode threads. Reading a file,
decoding it and resizing it release the GIL, so threads load as fast as DataLoader workers do, with the memory of one of
them. `engine.train.data.device` transfers the batches to the device; evaluation of a checkpoint uses them directly.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import re
import secrets
import signal
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from math import prod
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from engine.base.errors import CodedError
from engine.base.exits import describe_loader_exit, oom_kill_count
from engine.base.process import STOP_SIGNALS, die_with_parent
from engine.base.threads import CancellingPool, map_in_threads
from engine.config.schema import Config
from engine.train.data.batch import Batch, BatchDataset
from engine.train.data.plan import RANK_BATCHES, batch_bytes, loader_processes, uses_threads
from engine.train.data.sampler import BatchRequest
from engine.train.data.sources.base import EncodedSource, ImageFormat, ImageSource, Label

WORKER_EXIT_SECONDS = 0.5  # bounds the wait for a dying worker to exit
# Batches that decode threads load at the same time. With two of them no thread idles while the last images of a batch
# are decoded, nor while the batch is sent.
BATCHES_IN_PROGRESS = 2


class LoaderProcessError(CodedError):
    """A loader process exited; the message says how."""


class BatchLoader:
    """Iterator over the CPU batches of all requests, in order.

    With `workers` > 0 the constructor forks the loader processes: create it before the process initializes CUDA or
    starts threads. The same processes serve the whole run. They are `workers` DataLoader workers, or few of them with
    `workers` decode threads in all (`engine.train.data.plan.uses_threads`). A batch has at most `data.batch_size`
    images for each of the `devices_per_rank`. With `threads` and no workers, so many threads of this process load image
    files.
    """

    def __init__(
        self,
        source: ImageSource,
        config: Config,
        image_format: ImageFormat,
        requests: Iterable[BatchRequest],
        workers: int,
        devices_per_rank: int = 1,
        threads: int = 0,
    ) -> None:
        dataset = BatchDataset(source, config, image_format)
        self.workers = workers
        """Number of decode threads, or of DataLoader workers that load one batch each; 0 without any."""
        self._is_threaded = False
        self._oom_kills_at_start = oom_kill_count()
        self._processes: list[BaseProcess] = []
        self._batches: Iterator[Batch] = map(dataset.__getitem__, requests)
        if threads:
            self._batches = map_in_threads(dataset.__getitem__, requests, threads)
        if workers:
            processes, prefetch, loaded = loader_processes(config, workers), config.data.prefetch, None
            if uses_threads(config) and isinstance(source, EncodedSource):
                self._is_threaded = True
                per_process = BATCHES_IN_PROGRESS + prefetch + RANK_BATCHES
                size = batch_bytes(config.data.numeric_batch_size * devices_per_rank, image_format)
                buffers = BatchBuffers(processes, per_process, size)
                loaded = ThreadedBatches(source, dataset, requests, workers, buffers)
            loader: DataLoader[Any] = DataLoader(
                loaded or dataset,
                batch_size=None,
                sampler=None if loaded else requests,
                num_workers=processes,
                collate_fn=_as_loaded,
                multiprocessing_context="fork",
                prefetch_factor=prefetch,
                worker_init_fn=partial(init_worker, os.getpid()),
                generator=torch.Generator().manual_seed(config.run.seed),
            )
            other_children = set(multiprocessing.active_children())
            self._batches = map(loaded.receive if loaded else _as_loaded, iter(loader))
            self._processes = [child for child in multiprocessing.active_children() if child not in other_children]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def worker_death(self) -> LoaderProcessError | None:
        """Return how a loader process has died; None if none has.

        Call it after any exception: a dead worker surfaces as a truncated message, a closed socket, or a RuntimeError
        that the SIGCHLD handler of torch's DataLoader raises at an arbitrary line.
        """
        if self._processes:
            # torch's handler would raise again for every child that exits from here on.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # A dying worker closes its socket before it can be reaped.
            connection.wait([process.sentinel for process in self._processes], timeout=WORKER_EXIT_SECONDS)
        for process in self._processes:
            if process.exitcode:
                oom_killed = None if self._oom_kills_at_start is None else oom_kill_count() != self._oom_kills_at_start
                threaded = self._is_threaded
                problem = describe_loader_exit(process.exitcode, oom_killed=oom_killed, threaded=threaded)
                name = "a loader process" if threaded else "a DataLoader worker"
                return LoaderProcessError(f"{name} exited: {problem}", code=problem.code)
        return None


def _as_loaded(batch: Any) -> Any:
    return batch


class BatchBuffers:
    """Memory for the images of batches, which loader processes write and the rank reads without a copy.

    Create it before the processes are forked: they share its mapping with the rank, outside of /dev/shm. New memory for
    each batch would cost a page fault for each 4 KiB, a tenth of the time to load a photo of 224x224. A buffer of
    `num_bytes` is free again when the last tensor that shares its memory in the rank is gone.
    """

    def __init__(self, processes: int, per_process: int, num_bytes: int) -> None:
        self._per_process, self._num_bytes = per_process, num_bytes
        # One byte per buffer: 1 from when a loader process takes it until the rank has released it.
        self._in_use = mmap.mmap(-1, processes * per_process)
        # Pages without images take no memory.
        self._pixels = np.frombuffer(mmap.mmap(-1, processes * per_process * num_bytes), np.uint8)

    def take(self, process: int, shape: tuple[int, ...]) -> int | None:
        """Return the number of a free buffer of a loader process, which is then in use; None if there is none for
        images of this shape."""
        first = process * self._per_process
        number = self._in_use.find(b"\0", first, first + self._per_process)
        if number < 0 or prod(shape) > self._num_bytes:
            return None
        self._in_use[number] = 1
        return number

    def images(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """Return the images of a buffer, uint8 of shape N x C x H x W with the channels last in memory."""
        return _as_images(self._bytes(number, shape), shape)

    def receive(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """Return the images of a buffer in the rank, and release it when the last tensor that shares them is gone."""
        pixels = self._bytes(number, shape)
        # A tensor keeps the array whose memory it shares, and so do its views.
        weakref.finalize(pixels, self.release, number).atexit = False
        return _as_images(pixels, shape)

    def release(self, number: int) -> None:
        """Make a buffer free again."""
        self._in_use[number] = 0

    def _bytes(self, number: int, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._pixels[number * self._num_bytes :][: prod(shape)]


def _as_images(pixels: np.ndarray[Any, np.dtype[np.uint8]], shape: tuple[int, ...]) -> Tensor:
    count, channels, height, width = shape
    return torch.from_numpy(pixels).view(count, height, width, channels).permute(0, 3, 1, 2)


# A batch on the way to the rank. With the number of a buffer, its images, of a shape, are there and not in the batch.
SentBatch = tuple[Batch, int | None, tuple[int, ...]]


class ThreadedBatches(IterableDataset[SentBatch]):
    """The batches of all requests in order. Iterate over it in a loader process, and `receive` them in the rank.

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
        self._source, self._dataset, self._requests = source, dataset, requests
        self._threads, self._buffers = threads, buffers

    def __iter__(self) -> Iterator[SentBatch]:
        worker = get_worker_info()
        process, processes = (0, 1) if worker is None else (worker.id, worker.num_workers)
        threads = max((self._threads + processes - 1 - process) // processes, 1)
        in_progress: deque[tuple[BatchRequest, int | None, Tensor, list[Future[Label]]]] = deque()
        with CancellingPool(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for request in islice(self._requests, process, None, processes):
                in_progress.append((request, *self._start(request, process, pool)))
                if len(in_progress) == BATCHES_IN_PROGRESS:
                    yield self._finish(*in_progress.popleft())
            while in_progress:
                yield self._finish(*in_progress.popleft())

    def receive(self, sent: SentBatch) -> Batch:
        """Return the batch that a loader process has sent."""
        batch, number, shape = sent
        return batch if number is None else replace(batch, images=self._buffers.receive(number, shape))

    def _start(
        self, request: BatchRequest, process: int, pool: ThreadPoolExecutor
    ) -> tuple[int | None, Tensor, list[Future[Label]]]:
        """Start to load the images of a request; returns their buffer, the images and what loads each."""
        shape = self._dataset.image_shape(request)
        number = self._buffers.take(process, shape)
        images = torch.empty(shape, dtype=torch.uint8) if number is None else self._buffers.images(number, shape)
        part, preprocessing = request.part, self._dataset.preprocessing(request)
        rows = zip(images.numpy(), request.indices.tolist(), strict=True)
        load = self._source.load_into
        return number, images, [pool.submit(load, pixels, part, index, preprocessing) for pixels, index in rows]

    def _finish(
        self, request: BatchRequest, number: int | None, images: Tensor, loaded: list[Future[Label]]
    ) -> SentBatch:
        """Wait for the images of a request. Raises the error of the first image that failed, as `BatchDataset`."""
        results = [(row, future.exception()) for row, future in enumerate(loaded)]
        errors = {row: error for row, error in results if isinstance(error, Exception)}
        labels = self._source.get_labels(request.part)[request.indices]
        batch = self._dataset.finish(request, images, labels, errors)
        if number is not None and batch.images is not images:
            # Transforms, or the skipped images of the batch, made a copy.
            self._buffers.release(number)
            number = None
        if number is None:
            return batch, None, ()
        return replace(batch, images=torch.empty(0, dtype=torch.uint8)), number, tuple(images.shape)


def init_worker(rank_pid: int, _: int) -> None:
    """Set up a loader process: it dies with its rank, and ignores stop signals because its rank handles them."""
    die_with_parent(rank_pid)
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    # The names of a million images take a tenth of a second to traverse, and to visit an object copies its memory page.
    gc.freeze()
    connection.arbitrary_address = _abstract_socket_address  # type: ignore[attr-defined]
    # The default handler prints the error and drops the batch, and the rank would wait for that batch forever.
    Queue._on_queue_feeder_error = staticmethod(lambda error, _: exit_unable_to_send(error))  # type: ignore[attr-defined]


def _abstract_socket_address(_: str) -> str:
    """Return the address of the socket over which a DataLoader worker passes file descriptors to its rank.

    A killed worker would leave a socket file in $TMPDIR, and a long $TMPDIR exceeds the length limit of a socket path.
    An address in the abstract namespace (unix(7)) avoids both. multiprocessing's authentication key controls access.
    """
    return f"\0gputrain-{os.getpid()}-{secrets.token_hex(8)}"


def exit_unable_to_send(error: BaseException) -> NoReturn:
    """Exit this DataLoader worker because it cannot send a batch.

    If shared memory is full it exits by SIGBUS, the signal that the kernel sends when a write to /dev/shm runs out of
    memory, so that the rank reports both cases alike.
    """
    traceback.print_exception(error)
    sys.stderr.flush()
    shm_full = "torch_" in str(error) and re.search(r"No space left|Cannot allocate memory", str(error))
    if shm_full:
        os.kill(os.getpid(), signal.SIGBUS)
        # The signal may be delivered to another thread; do not reach os._exit before it takes effect.
        time.sleep(WORKER_EXIT_SECONDS)
    os._exit(1)
