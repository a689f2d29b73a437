"""Batches on the device that trains on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.data.augment.augmentation import apply_batch_params
from engine.data.augment.batch_ops import normalize
from engine.data.pipelines.loader import Batch, BatchLoader
from engine.data.sources.base import ImageFormat


@dataclass(frozen=True)
class DeviceBatch:
    """On the device: normalised `images`, N x C x H x W, and `labels`, N; `loss_weight` and `ends_step` as in
    BatchRequest; `unread` says of each image that was left out which it is and why."""

    images: Tensor
    labels: Tensor
    loss_weight: float
    ends_step: bool = True
    unread: tuple[str, ...] = ()


class DeviceLoader(Protocol):
    """One batch for each request, in order, from either pipeline. `workers` are its loader processes."""

    workers: int

    def __next__(self) -> DeviceBatch: ...


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    if tensor.device.type == device.type:
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


class StreamingLoader:
    """What loader processes make, or this process itself, brought to the device. On a GPU that is done beside the
    computing, on a stream of its own; with loader processes also by a thread of its own, which begins a batch as soon
    as the one before it is taken."""

    def __init__(self, batches: BatchLoader, image_format: ImageFormat, device: torch.device) -> None:
        self.workers = batches.workers
        self._device = device
        shape = (1, image_format.channels, 1, 1)
        self._mean = torch.tensor(image_format.mean, device=device).view(shape)
        self._std = torch.tensor(image_format.std, device=device).view(shape)
        if device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(device)
            sent = self._transfer_all(batches)
            # Without loader processes the making of a batch draws from the generators that this thread draws from too.
            self._batches: Iterator[DeviceBatch] = map(
                self._wait_for_transfer, PrefetchIterator(sent) if batches.workers else sent
            )
        else:
            self._batches = map(self._prepare, batches)

    def __next__(self) -> DeviceBatch:
        return next(self._batches)

    def _prepare(self, batch: Batch) -> DeviceBatch:
        images, labels = to_device(batch.images, self._device), to_device(batch.labels, self._device)
        if batch.augment_params is not None:
            images = apply_batch_params(images, batch.augment_params.to(self._device))
        images = normalize(images, self._mean, self._std)
        return DeviceBatch(images, labels, batch.loss_weight, batch.ends_step, batch.unread)

    def _transfer_all(self, batches: BatchLoader) -> Iterator[tuple[DeviceBatch, torch.cuda.Event]]:
        # Each thread has a current device of its own, which is the first at its start.
        torch.cuda.set_device(self._copy_stream.device)
        yield from map(self._transfer, batches)

    def _transfer(self, batch: Batch) -> tuple[DeviceBatch, torch.cuda.Event]:
        """On its way to the device, and what is recorded when it is there."""
        with torch.cuda.stream(self._copy_stream):
            made = self._prepare(batch)
            there = torch.cuda.Event()
            there.record(self._copy_stream)
        return made, there

    def _wait_for_transfer(self, transfer: tuple[DeviceBatch, torch.cuda.Event]) -> DeviceBatch:
        """The device waits for it, the host does not."""
        batch, there = transfer
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(there)
        for tensor in (batch.images, batch.labels):
            # Its memory is not given to a later batch while the computing still reads it.
            tensor.record_stream(computing)
        return batch


T = TypeVar("T")


class PrefetchIterator(Generic[T]):
    """The items in their order, no more than one of them ahead. The thread is started when the first is asked for, and
    ends with the items, or with what is raised in place of one, which is raised here from then on; or else with the
    process."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._queue: Queue[T | BaseException] = Queue(1)
        self._exception: BaseException | None = None
        self._thread: Thread | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._exception is not None:
            raise self._exception
        if self._thread is None:
            self._thread = Thread(target=self._produce, name="next batch", daemon=True)
            self._thread.start()
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._exception = item
            raise item
        self._queue.task_done()
        return item

    def _produce(self) -> None:
        try:
            for item in self._items:
                self._queue.put(item)
                # Until it is taken: what is made further ahead would only take up the device's memory.
                self._queue.join()
            self._queue.put(StopIteration())
        except BaseException as error:
            self._queue.put(error)
