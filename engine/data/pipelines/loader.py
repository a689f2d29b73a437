"""From batch requests to batches: in this process, or in loader processes that work ahead."""

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

WORKER_EXIT_SECONDS = 0.5


@dataclass(frozen=True)
class Batch:
    """`images` N x C x H x W, uint8; `labels` N, int64; `loss_weight` and `ends_step` as in BatchRequest; `unread` says
    of each image that was left out which it is and why; `augment_params` what is still to be done to training
    images."""

    images: Tensor
    labels: Tensor
    loss_weight: float
    ends_step: bool = True
    unread: tuple[str, ...] = ()
    augment_params: AugmentParams | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes only the images go through shared memory: a file and a connection for each small tensor
        would take longer than to make it."""
        return _unpickle_batch, (
            self.images,
            self.labels.numpy(),
            self.loss_weight,
            self.ends_step,
            self.unread,
            self.augment_params,
        )


def _unpickle_batch(images: Tensor, labels: Labels, *others: Any) -> Batch:
    return Batch(images, torch.from_numpy(labels), *others)


class BatchDataset(Dataset[Batch]):
    """Answers a BatchRequest with its batch. Raises UsageError on construction where the user's own transform cannot be
    had."""

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
        images, draws = convert_to_format(torch.from_numpy(pixels), self._format), None
        if request.part == "train":
            images = self._augmentation.apply_image_transforms(images, request.epoch, request.indices)
            draws = self._augmentation.draw_batch_params(request.epoch, request.indices)
        return Batch(images, torch.from_numpy(labels), request.loss_weight, request.ends_step, unread, draws)

    def _load(self, request: BatchRequest, indices: Indices) -> tuple[Images, Labels]:
        """Those images of a request. The user's own dataset may draw random numbers for each of its items."""
        part, crop = request.part, self._augmentation.crop_spec(request.epoch) if request.part == "train" else None
        if not is_user_code(self._config.data.dataset):
            return self._source.load(part, indices, crop)
        bits = random_bits(self._config.run.seed, RandomStream.USER_ITEM, request.epoch, indices)
        loaded = []
        with fork_all_rngs() as seeded:
            for row, drawn in enumerate(bits):
                seeded(drawn)
                loaded.append(self._source.load(part, indices[row : row + 1], crop))
        return _concatenate(loaded)

    def _load_readable(self, request: BatchRequest) -> tuple[BatchRequest, Images, Labels, tuple[str, ...]]:
        """Return what can be read of a batch, and why each other image cannot. See `BatchRequest.keep`: images that
        stay and weigh nothing are black."""
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
        num_images, own = len(kept.indices), self._source.format
        if len(loaded) < num_images:
            black = np.zeros((num_images, own.channels, own.size, own.size), np.uint8)
            loaded = [(black, np.zeros(num_images, np.int64))]
        pixels, labels = _concatenate(loaded)
        return kept, pixels, labels, tuple(unread)


def _concatenate(loaded: Sequence[tuple[Images, Labels]]) -> tuple[Images, Labels]:
    return np.concatenate([pixels for pixels, _ in loaded]), np.concatenate([labels for _, labels in loaded])


class LoaderProcessError(Exception):
    """A loader process is gone; the text says how that came about."""


class BatchLoader:
    """One batch for each request, in order. With `workers` > 0 loader processes are forked on construction, so make it
    before the process touches CUDA or starts threads; one set of them serves the whole run."""

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
            before = set(multiprocessing.active_children())
            self._batches = iter(loader)
            self._processes = [child for child in multiprocessing.active_children() if child not in before]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def raise_if_worker_died(self) -> None:
        """Raises LoaderProcessError where a loader process has died, which comes out as any error of torch's own at any
        place: half a message, a closed socket, or one raised by its handler of SIGCHLD."""
        if self._processes:
            # It would raise its error again for each process that ends from here on.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # One whose socket is closed may take a moment to be gone.
            connection.wait([process.sentinel for process in self._processes], timeout=WORKER_EXIT_SECONDS)
        for process in self._processes:
            if process.exitcode:
                room = None if self._oom_kills_at_start is None else oom_kill_count() != self._oom_kills_at_start
                how = describe_loader_exit(process.exitcode, room)
                raise LoaderProcessError(f"one of its loader processes ended: {how}")


def _identity_collate(batch: Any) -> Any:
    return batch


def _init_worker(rank_pid: int, _: int) -> None:
    """A loader process ends with its rank, and leaves it to the rank to answer a signal that was sent to all."""
    die_with_parent(rank_pid)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    connection.arbitrary_address = _abstract_socket_address  # type: ignore[attr-defined]
    # Its own answer is to go on without the batch, for which the rank would wait for ever.
    Queue._on_queue_feeder_error = staticmethod(_exit_on_queue_error)  # type: ignore[attr-defined]


def _abstract_socket_address(_: str) -> str:
    """Of the socket over which a loader process hands its batches to the rank. A file would be left behind in $TMPDIR
    by whoever is killed, and a long $TMPDIR would be no address. The abstract namespace (unix(7)) has neither; who may
    connect is decided by multiprocessing's key."""
    return f"\0gputrain-{os.getpid()}-{secrets.token_hex(8)}"


def _exit_on_queue_error(error: BaseException, _: object) -> None:
    """End this loader process, which cannot hand over a batch; by SIGBUS where the shared memory is full, as the kernel
    does it where the memory turns out to be missing later."""
    traceback.print_exception(error)
    sys.stderr.flush()
    full = "torch_" in str(error) and re.search(r"No space left|Cannot allocate memory", str(error))
    if full:
        os.kill(os.getpid(), signal.SIGBUS)
        # It may reach another thread than this one.
        time.sleep(WORKER_EXIT_SECONDS)
    os._exit(1)
