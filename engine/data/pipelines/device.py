"""Batches on the device that trains on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.data.augment.augmentation import vary
from engine.data.augment.batch_ops import normalise
from engine.data.pipelines.loader import Batch, Batches
from engine.data.sources.base import ImageFormat


@dataclass(frozen=True)
class DeviceBatch:
    """On the device: normalised `images`, N x C x H x W, and `labels`, N; `weight` and `ends_step` as in
    BatchRequest; `unread` says of each image that was left out which it is and why."""

    images: Tensor
    labels: Tensor
    weight: float
    ends_step: bool = True
    unread: tuple[str, ...] = ()


class DeviceBatches(Protocol):
    """One batch for each request, in order, from either pipeline. `workers` are its loader processes."""

    workers: int

    def __next__(self) -> DeviceBatch: ...


def bring(values: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for it."""
    if values.device.type == device.type:
        return values
    return (values if values.is_pinned() else values.pin_memory()).to(device, non_blocking=True)


class StreamedBatches:
    """What loader processes make, or this process itself, brought to the device. On a GPU that is done beside the
    computing, on a stream of its own; with loader processes also by a thread of its own, which begins a batch as soon
    as the one before it is taken."""

    def __init__(self, batches: Batches, image_format: ImageFormat, device: torch.device) -> None:
        self.workers = batches.workers
        self._device = device
        shape = (1, image_format.channels, 1, 1)
        self._mean = torch.tensor(image_format.mean, device=device).view(shape)
        self._std = torch.tensor(image_format.std, device=device).view(shape)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            sent = self._all_sent(batches)
            # Without loader processes the making of a batch draws from the generators that this thread draws from too.
            self._ready: Iterator[DeviceBatch] = map(self._received, Ahead(sent) if batches.workers else sent)
        else:
            self._ready = map(self._made, batches)

    def __next__(self) -> DeviceBatch:
        return next(self._ready)

    def _made(self, batch: Batch) -> DeviceBatch:
        images, labels = bring(batch.images, self._device), bring(batch.labels, self._device)
        if batch.draws is not None:
            images = vary(images, batch.draws.to(self._device))
        images = normalise(images, self._mean, self._std)
        return DeviceBatch(images, labels, batch.weight, batch.ends_step, batch.unread)

    def _all_sent(self, batches: Batches) -> Iterator[tuple[DeviceBatch, torch.cuda.Event]]:
        # Each thread has a current device of its own, which is the first at its start.
        torch.cuda.set_device(self._stream.device)
        yield from map(self._sent, batches)

    def _sent(self, batch: Batch) -> tuple[DeviceBatch, torch.cuda.Event]:
        """On its way to the device, and what is recorded when it is there."""
        with torch.cuda.stream(self._stream):
            made = self._made(batch)
            there = torch.cuda.Event()
            there.record(self._stream)
        return made, there

    def _received(self, sent: tuple[DeviceBatch, torch.cuda.Event]) -> DeviceBatch:
        """The device waits for it, the host does not."""
        batch, there = sent
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(there)
        for tensor in (batch.images, batch.labels):
            # Its memory is not given to a later batch while the computing still reads it.
            tensor.record_stream(computing)
        return batch


T = TypeVar("T")


class Ahead(Generic[T]):
    """The items in their order, no more than one of them ahead. The thread is started when the first is asked for, and
    ends with the items, or with what is raised in place of one, which is raised here from then on; or else with the
    process."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._made: Queue[T | BaseException] = Queue(1)
        self._end: BaseException | None = None
        self._thread: Thread | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is not None:
            raise self._end
        if self._thread is None:
            self._thread = Thread(target=self._make, name="next batch", daemon=True)
            self._thread.start()
        item = self._made.get()
        if isinstance(item, BaseException):
            self._end = item
            raise item
        self._made.task_done()
        return item

    def _make(self) -> None:
        try:
            for item in self._items:
                self._made.put(item)
                # Until it is taken: what is made further ahead would only take up the device's memory.
                self._made.join()
            self._made.put(StopIteration())
        except BaseException as error:
            self._made.put(error)
