"""Load CPU batches for batch requests, in this process or in DataLoader workers that prefetch.

`engine.data.pipelines.device` transfers them to the device; evaluation of a checkpoint uses them directly.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from engine.config.schema import Config
from engine.data.limits import loader_processes, uses_threads
from engine.data.pipelines.batch import Batch, BatchDataset
from engine.data.pipelines.decode_threads import ThreadedBatches
from engine.data.pipelines.thread_count import ThreadCount
from engine.data.pipelines.worker_process import WORKER_EXIT_SECONDS, init_worker
from engine.data.sampler import BatchRequest
from engine.data.sources.base import ImageFormat, ImageSource
from engine.data.sources.encoded import EncodedSource
from engine.data.stage_times import LoaderCounters
from engine.utils.exits import describe_loader_exit, oom_kill_count


class LoaderProcessError(Exception):
    """A DataLoader worker exited; the message says how."""


class BatchLoader:
    """Iterator over the CPU batches of all requests, in order.

    With `workers` > 0 the constructor forks the loader processes: create it before the process initializes CUDA or
    starts threads. The same processes serve the whole run. They are `workers` DataLoader workers, or few of them with
    `workers` decode threads in all (`engine.data.limits.uses_threads`). With `max_workers`, the number of threads
    follows the steps of the rank, at most to `max_workers`.
    """

    def __init__(
        self,
        source: ImageSource,
        config: Config,
        image_format: ImageFormat,
        requests: Iterable[BatchRequest],
        workers: int,
        max_workers: int | None = None,
    ) -> None:
        dataset = BatchDataset(source, config, image_format)
        self.max_workers = max_workers or workers
        self.num_processes = loader_processes(config, self.max_workers) if workers else 0
        self.counters = LoaderCounters(self.num_processes)
        self.thread_count: ThreadCount | None = None
        self._workers, self._busy_seconds = workers, 0.0
        self._oom_kills_at_start = oom_kill_count()
        self._processes: list[BaseProcess] = []
        self._batches: Iterator[Batch] = _load_here(dataset, requests, self.counters)
        if workers > 0:
            loaded: Dataset[Batch] = _CountingDataset(dataset, self.counters)
            sampler: Iterable[BatchRequest] | None = requests
            if uses_threads(config) and isinstance(source, EncodedSource):
                self.thread_count = ThreadCount(workers, max_workers)
                loaded = ThreadedBatches(source, dataset, requests, self.thread_count, self.counters)
                sampler = None
            loader: DataLoader[Batch] = DataLoader(
                loaded,
                batch_size=None,
                sampler=sampler,
                num_workers=self.num_processes,
                collate_fn=_identity_collate,
                multiprocessing_context="fork",
                prefetch_factor=config.data.prefetch,
                worker_init_fn=partial(init_worker, os.getpid(), self.counters),
                generator=torch.Generator().manual_seed(config.run.seed),
            )
            other_children = set(multiprocessing.active_children())
            self._batches = iter(loader)
            self._processes = [child for child in multiprocessing.active_children() if child not in other_children]
        # After the fork, so that the loader processes count into their own rows.
        self.counters.attach()

    @property
    def workers(self) -> int:
        """Number of decode threads at present, or of DataLoader workers that load one batch each; 0 without any."""
        return self._workers if self.thread_count is None else self.thread_count.value

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.counters.receive_batch()
        return next(self._batches)

    def observe(self, wait_seconds: float, step_seconds: float) -> None:
        """Let the number of decode threads follow the steps: call after each batch, with the rank's wait for it and the
        time since it received the batch before."""
        if self.thread_count is not None:
            busy_before, self._busy_seconds = self._busy_seconds, self.counters.busy_seconds()
            self.thread_count.observe(wait_seconds, step_seconds, self._busy_seconds - busy_before)

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
                reason = describe_loader_exit(process.exitcode, oom_killed)
                raise LoaderProcessError(f"a DataLoader worker exited: {reason}")


def _load_here(dataset: BatchDataset, requests: Iterable[BatchRequest], counters: LoaderCounters) -> Iterator[Batch]:
    """Yield the batches of all requests, loaded by this process."""
    for request in requests:
        batch = dataset[request]
        counters.add_batch(len(batch.labels))
        yield batch


class _CountingDataset(Dataset[Batch]):
    """The dataset of a DataLoader worker that loads whole batches; counts them."""

    def __init__(self, dataset: BatchDataset, counters: LoaderCounters) -> None:
        self._dataset, self._counters = dataset, counters

    def __getitem__(self, request: BatchRequest) -> Batch:
        batch = self._dataset[request]
        self._counters.add_batch(len(batch.labels))
        return batch


def _identity_collate(batch: Any) -> Any:
    return batch
