"""Load CPU batches for batch requests, in this process or in DataLoader workers that prefetch.

`engine.data.pipelines.device` transfers them to the device; evaluation of a checkpoint uses them directly.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.data.augment.augmentation import Augmentation, AugmentParams
from engine.data.augment.batch_ops import convert_to_format
from engine.data.rng import fork_all_rngs
from engine.data.sampler import BatchRequest, Indices, RandomStream, random_bits
from engine.data.sources.base import ImageFormat, Images, ImageSource, Labels, UnreadableImageError
from engine.utils.exits import describe_loader_exit, oom_kill_count
from engine.utils.process import STOP_SIGNALS, die_with_parent

WORKER_EXIT_SECONDS = 0.5  # bounds the wait for a dying worker to exit


@dataclass(frozen=True)
class Batch:
    """A CPU batch: `images`, N x C x H x W uint8 (float32 if `ImageFormat.is_float`), and `labels`, N int64.

    `loss_weight` and `ends_step` are those of its `BatchRequest`. `unread` names each skipped image and the reason.
    `augment_params` are the batch transforms still to apply on the device; None for validation. `readable` has the
    indices of the images if any was skipped.
    """

    images: Tensor
    labels: Tensor
    loss_weight: float
    ends_step: bool = True
    unread: tuple[str, ...] = ()
    augment_params: AugmentParams | None = None
    readable: Indices | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all but the images by value: a shared-memory file and a socket connection for each small tensor would
        take longer than creating it."""
        return _unpickle_batch, (
            self.images,
            self.labels.numpy(),
            self.loss_weight,
            self.ends_step,
            self.unread,
            self.augment_params,
            self.readable,
        )


def _unpickle_batch(images: Tensor, labels: Labels, *fields: Any) -> Batch:
    return Batch(images, torch.from_numpy(labels), *fields)


class BatchDataset(Dataset[Batch]):
    """Map-style dataset whose index is a `BatchRequest` and whose item is the whole batch.

    Raises UsageError on construction if the user's transform cannot be loaded.
    """

    def __init__(self, source: ImageSource, config: Config, image_format: ImageFormat) -> None:
        self._source, self._config, self._format = source, config, image_format
        self._augmentation = Augmentation(config, image_format)

    def __getitem__(self, request: BatchRequest) -> Batch:
        unread: tuple[str, ...] = ()
        try:
            pixels, labels = self._load(request, request.indices)
        except UnreadableImageError:
            if self._config.data.on_bad == "fail":
                raise
            request, pixels, labels, unread = self._load_readable(request)
        images, augment_params = torch.from_numpy(pixels), None
        if self._source.in_memory:
            images = convert_to_format(images, self._format.at_epoch(request.epoch), training=request.is_training)
        if request.is_training:
            images = self._augmentation.apply_image_transforms(images, request.epoch, request.indices)
            augment_params = self._augmentation.draw_batch_params(request.epoch, request.indices)
        readable = request.indices if unread else None
        weight, ends_step = request.loss_weight, request.ends_step
        return Batch(images, torch.from_numpy(labels), weight, ends_step, unread, augment_params, readable)

    def _load(self, request: BatchRequest, indices: Indices) -> tuple[Images, Labels]:
        """Load some images of a request. A user dataset may draw random numbers, so it is seeded per item."""
        part, crop = request.part, self._augmentation.crop_spec(request.epoch) if request.is_training else None
        if not is_user_code(self._config.data.dataset):
            return self._source.load(part, indices, crop)
        bits = random_bits(self._config.run.seed, RandomStream.USER_ITEM, request.epoch, indices)
        loaded = []
        with fork_all_rngs() as seed_rng:
            for row, item_bits in enumerate(bits):
                seed_rng(item_bits)
                loaded.append(self._source.load(part, indices[row : row + 1], crop))
        return _concatenate(loaded)

    def _load_readable(self, request: BatchRequest) -> tuple[BatchRequest, Images, Labels, tuple[str, ...]]:
        """Load the readable images of a request; returns the reduced request, images, labels and the read errors.

        Images that stay with a weight of 0 (see `BatchRequest.keep`) are black.
        """
        loaded: list[tuple[Images, Labels]] = []
        readable: list[bool] = []
        unread: list[str] = []
        for index in request.indices:
            try:
                loaded.append(self._load(request, np.array([index])))
                readable.append(True)
            except UnreadableImageError as error:
                unread.append(str(error))
                readable.append(False)
        kept = request.keep(readable)
        num_images, source_format = len(kept.indices), self._source.format
        if len(loaded) < num_images:
            size = source_format.at_epoch(request.epoch).preprocessing(training=request.is_training).size
            black = np.zeros((num_images, source_format.channels, size, size), source_format.dtype)
            loaded = [(black, np.zeros(num_images, np.int64))]
        pixels, labels = _concatenate(loaded)
        return kept, pixels, labels, tuple(unread)


def _concatenate(loaded: Sequence[tuple[Images, Labels]]) -> tuple[Images, Labels]:
    return np.concatenate([pixels for pixels, _ in loaded]), np.concatenate([labels for _, labels in loaded])


class LoaderProcessError(Exception):
    """A DataLoader worker exited; the message says how."""


class BatchLoader:
    """Iterator over the CPU batches of all requests, in order.

    With `workers` > 0 the constructor forks the DataLoader workers: create it before the process initializes CUDA or
    starts threads. The same workers serve the whole run.
    """

    def __init__(
        self,
        source: ImageSource,
        config: Config,
        image_format: ImageFormat,
        requests: Iterable[BatchRequest],
        workers: int,
    ) -> None:
        dataset = BatchDataset(source, config, image_format)
        self.workers = workers
        self._oom_kills_at_start = oom_kill_count()
        self._processes: list[BaseProcess] = []
        self._batches: Iterator[Batch] = (dataset[request] for request in requests)
        if workers > 0:
            loader: DataLoader[Batch] = DataLoader(
                dataset,
                batch_size=None,
                sampler=requests,
                num_workers=workers,
                collate_fn=_identity_collate,
                multiprocessing_context="fork",
                prefetch_factor=config.data.prefetch,
                worker_init_fn=partial(_init_worker, os.getpid()),
                generator=torch.Generator().manual_seed(config.run.seed),
            )
            other_children = set(multiprocessing.active_children())
            self._batches = iter(loader)
            self._processes = [child for child in multiprocessing.active_children() if child not in other_children]

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
                reason = describe_loader_exit(process.exitcode, oom_killed)
                raise LoaderProcessError(f"a DataLoader worker exited: {reason}")


def _identity_collate(batch: Any) -> Any:
    return batch


def _init_worker(rank_pid: int, _: int) -> None:
    """Set up a DataLoader worker: it dies with its rank, and ignores stop signals because its rank handles them."""
    die_with_parent(rank_pid)
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    connection.arbitrary_address = _abstract_socket_address  # type: ignore[attr-defined]
    # The default handler prints the error and drops the batch, and the rank would wait for that batch forever.
    Queue._on_queue_feeder_error = staticmethod(_exit_on_queue_error)  # type: ignore[attr-defined]


def _abstract_socket_address(_: str) -> str:
    """Return the address of the socket over which a DataLoader worker passes file descriptors to its rank.

    A killed worker would leave a socket file in $TMPDIR, and a long $TMPDIR exceeds the length limit of a socket path.
    An address in the abstract namespace (unix(7)) avoids both. multiprocessing's authentication key controls access.
    """
    return f"\0gputrain-{os.getpid()}-{secrets.token_hex(8)}"


def _exit_on_queue_error(error: BaseException, _: object) -> None:
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
