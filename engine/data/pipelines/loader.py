"""Load CPU batches for batch requests, in this process or in DataLoader workers that prefetch.

`engine.data.pipelines.device` transfers them to the device; evaluation of a checkpoint uses them directly.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from engine.config.schema import Config
from engine.data.limits import (
    BATCHES_IN_PROGRESS,
    LoaderFootprint,
    buffers_per_process,
    loader_processes,
    uses_threads,
)
from engine.data.pipelines.batch import Batch, BatchDataset
from engine.data.pipelines.batch_buffers import BatchBuffers, SentBatch
from engine.data.pipelines.decode_threads import ThreadedBatches
from engine.data.pipelines.worker_process import WORKER_EXIT_SECONDS, init_worker
from engine.data.sampler import BatchRequest
from engine.data.sources.base import ImageFormat, ImageSource
from engine.data.sources.encoded import EncodedSource
from engine.utils.errors import CodedError
from engine.utils.exits import describe_loader_exit, oom_kill_count
from engine.utils.threads import map_in_threads


class LoaderProcessError(CodedError):
    """A loader process exited; the message says how."""


class BatchLoader:
    """Iterator over the CPU batches of all requests, in order.

    With `workers` > 0 the constructor forks the loader processes: create it before the process initializes CUDA or
    starts threads. The same processes serve the whole run. They are `workers` DataLoader workers, or few of them with
    `workers` decode threads in all (`engine.data.limits.uses_threads`). A batch has at most `data.batch_size` images
    for each of the `devices_per_rank`. With `threads` and no workers, so many threads of this process load image files.
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
        self.num_processes = loader_processes(config, workers) if workers else 0
        self._is_threaded = workers > 0 and uses_threads(config) and isinstance(source, EncodedSource)
        self._prefetch = config.data.prefetch
        self._oom_kills_at_start = oom_kill_count()
        self._processes: list[BaseProcess] = []
        self._batches: Iterator[Batch] = (
            map_in_threads(dataset.__getitem__, requests, threads) if threads else map(dataset.__getitem__, requests)
        )
        if workers > 0:
            loaded: Dataset[Batch] | Dataset[SentBatch] = dataset
            sampler: Iterable[BatchRequest] | None = requests
            receive: Callable[[Any], Batch] = _as_received
            if uses_threads(config) and isinstance(source, EncodedSource):
                footprint = LoaderFootprint.from_config(config, 1, workers, image_format, devices_per_rank)
                per_process = buffers_per_process(config.data.prefetch)
                buffers = BatchBuffers(self.num_processes, per_process, footprint.batch_bytes)
                loaded = ThreadedBatches(source, dataset, requests, workers, buffers)
                receive = buffers.receive
                sampler = None
            loader: DataLoader[Any] = DataLoader(
                loaded,
                batch_size=None,
                sampler=sampler,
                num_workers=self.num_processes,
                collate_fn=_as_received,
                multiprocessing_context="fork",
                prefetch_factor=self._prefetch,
                worker_init_fn=partial(init_worker, os.getpid()),
                generator=torch.Generator().manual_seed(config.run.seed),
            )
            other_children = set(multiprocessing.active_children())
            self._batches = map(receive, iter(loader))
            self._processes = [child for child in multiprocessing.active_children() if child not in other_children]

    @property
    def ready_batches(self) -> int:
        """The most batches that the loader processes load before they are requested."""
        # Threads load the next batch while a process holds `data.prefetch` that are complete.
        ahead = BATCHES_IN_PROGRESS - 1 if self._is_threaded else 0
        return self.num_processes * (self._prefetch + ahead)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def raise_if_worker_died(self) -> None:
        """Raise LoaderProcessError if a DataLoader worker has died.

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
                raise LoaderProcessError(f"{name} exited: {problem}", code=problem.code)


def _as_received(batch: Any) -> Any:
    return batch
