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
from engine.config.user_code import is_own
from engine.data.augment.augmentation import Augmentation, Draws
from engine.data.augment.batch_ops import fit
from engine.data.rng import own_draws
from engine.data.sampler import BatchRequest, Indices, Stream, random_bits
from engine.data.sources.base import ImageFormat, Images, Labels, Source, UnreadableImageError
from engine.utils.exits import loader_exit_in_words, oom_kills
from engine.utils.process import STOPPING, die_with_parent

DYING_SECONDS = 0.5


@dataclass(frozen=True)
class Batch:
    """`images` N x C x H x W, uint8; `labels` N, int64; `weight` and `ends_step` as in BatchRequest; `unread` says of
    each image that was left out which it is and why; `draws` what is still to be done to training images."""

    images: Tensor
    labels: Tensor
    weight: float
    ends_step: bool = True
    unread: tuple[str, ...] = ()
    draws: Draws | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Between processes only the images go through shared memory: a file and a connection for each small tensor
        would take longer than to make it."""
        return _unpacked, (self.images, self.labels.numpy(), self.weight, self.ends_step, self.unread, self.draws)


def _unpacked(images: Tensor, labels: Labels, *others: Any) -> Batch:
    return Batch(images, torch.from_numpy(labels), *others)


class RequestedBatches(Dataset[Batch]):
    """Answers a BatchRequest with its batch. Raises UsageError on construction where the user's own transform cannot be
    had."""

    def __init__(self, source: Source, config: Config, image_format: ImageFormat) -> None:
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
        images, draws = fit(torch.from_numpy(pixels), self._format), None
        if request.part == "train":
            images = self._augmentation.before(images, request.epoch, request.indices)
            draws = self._augmentation.draws(request.epoch, request.indices)
        return Batch(images, torch.from_numpy(labels), request.weight, request.ends_step, unread, draws)

    def _load(self, request: BatchRequest, indices: Indices) -> tuple[Images, Labels]:
        """Those images of a request. The user's own dataset may draw random numbers for each of its items."""
        part, crop = request.part, self._augmentation.crop(request.epoch) if request.part == "train" else None
        if not is_own(self._config.data.dataset):
            return self._source.load(part, indices, crop)
        bits = random_bits(self._config.run.seed, Stream.OWN_ITEM, request.epoch, indices)
        loaded = []
        with own_draws() as seeded:
            for row, drawn in enumerate(bits):
                seeded(drawn)
                loaded.append(self._source.load(part, indices[row : row + 1], crop))
        return _joined(loaded)

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
        pixels, labels = _joined(loaded)
        return kept, pixels, labels, tuple(unread)


def _joined(loaded: Sequence[tuple[Images, Labels]]) -> tuple[Images, Labels]:
    return np.concatenate([pixels for pixels, _ in loaded]), np.concatenate([labels for _, labels in loaded])


class LoaderProcessError(Exception):
    """A loader process is gone; the text says how that came about."""


class Batches:
    """One batch for each request, in order. With `workers` > 0 loader processes are forked on construction, so make it
    before the process touches CUDA or starts threads; one set of them serves the whole run."""

    def __init__(
        self, source: Source, config: Config, image_format: ImageFormat, requests: Iterable[BatchRequest], workers: int
    ) -> None:
        dataset = RequestedBatches(source, config, image_format)
        self.workers = workers
        self._oom_kills = oom_kills()
        self._processes: list[BaseProcess] = []
        self._batches: Iterator[Batch] = (dataset[request] for request in requests)
        if workers > 0:
            loader: DataLoader[Batch] = DataLoader(
                dataset,
                batch_size=None,
                sampler=requests,
                num_workers=workers,
                collate_fn=_as_it_is,
                multiprocessing_context="fork",
                prefetch_factor=config.data.prefetch,
                worker_init_fn=partial(_become_worker, os.getpid()),
                generator=torch.Generator().manual_seed(config.run.seed),
            )
            before = set(multiprocessing.active_children())
            self._batches = iter(loader)
            self._processes = [child for child in multiprocessing.active_children() if child not in before]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def name_the_dead(self) -> None:
        """Raises LoaderProcessError where a loader process has died, which comes out as any error of torch's own at any
        place: half a message, a closed socket, or one raised by its handler of SIGCHLD."""
        if self._processes:
            # It would raise its error again for each process that ends from here on.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # One whose socket is closed may take a moment to be gone.
            connection.wait([process.sentinel for process in self._processes], timeout=DYING_SECONDS)
        for process in self._processes:
            if process.exitcode:
                room = None if self._oom_kills is None else oom_kills() != self._oom_kills
                how = loader_exit_in_words(process.exitcode, room)
                raise LoaderProcessError(f"one of its loader processes ended: {how}")


def _as_it_is(batch: Any) -> Any:
    return batch


def _become_worker(rank: int, _: int) -> None:
    """A loader process ends with its rank, and leaves it to the rank to answer a signal that was sent to all."""
    die_with_parent(rank)
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    connection.arbitrary_address = _address_without_a_file  # type: ignore[attr-defined]
    # Its own answer is to go on without the batch, for which the rank would wait for ever.
    Queue._on_queue_feeder_error = staticmethod(_die_of)  # type: ignore[attr-defined]


def _address_without_a_file(_: str) -> str:
    """Of the socket over which a loader process hands its batches to the rank. A file would be left behind in $TMPDIR
    by whoever is killed, and a long $TMPDIR would be no address. The abstract namespace (unix(7)) has neither; who may
    connect is decided by multiprocessing's key."""
    return f"\0gputrain-{os.getpid()}-{secrets.token_hex(8)}"


def _die_of(error: BaseException, _: object) -> None:
    """End this loader process, which cannot hand over a batch; by SIGBUS where the shared memory is full, as the kernel
    does it where the memory turns out to be missing later."""
    traceback.print_exception(error)
    sys.stderr.flush()
    full = "torch_" in str(error) and re.search(r"No space left|Cannot allocate memory", str(error))
    if full:
        os.kill(os.getpid(), signal.SIGBUS)
        # It may reach another thread than this one.
        time.sleep(DYING_SECONDS)
    os._exit(1)
