"""Batches on the training device: the interface of the loaders, and the streaming loader.

`engine.data.pipelines.loader` makes the CPU batches that `StreamingLoader` transfers. The training loop consumes a
`DeviceLoader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from engine.data.augment.augmentation import apply_batch_params
from engine.data.augment.batch_ops import channel_stats, normalize
from engine.data.pipelines.batch import Batch
from engine.data.pipelines.loader import BatchLoader
from engine.data.sources.base import ImageFormat


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device: normalized `images`, N x C x H x W float32, and `labels`, N int64.

    `loss_weight` and `ends_step` are those of its `BatchRequest`. `unread` names each skipped image and the reason.
    """

    images: Tensor
    labels: Tensor
    loss_weight: float
    ends_step: bool = True
    unread: tuple[str, ...] = ()


class DeviceLoader:
    """Yields the device batches of all requests, in order.

    What a loader does not override is that of one that prepares no batches in the background."""

    @property
    def workers(self) -> int:
        """Number of decode threads, or of DataLoader workers."""
        return 0

    @property
    def ready_batches(self) -> int:
        """The most batches that can be ready before the rank requests them."""
        return 0

    def __next__(self) -> DeviceBatch:
        raise NotImplementedError


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device asynchronously, through pinned memory."""
    if tensor.device.type == device.type:
        return tensor
    if not tensor.is_pinned():
        # Tensor.pin_memory keeps the strides, and refuses a gray image that is expanded to three channels.
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


T = TypeVar("T")
# Normalized batches on a CPU. To normalize a batch takes longer than a step with the last, small batch of an epoch.
CPU_PREFETCH = 2
# On its way to the GPU.
GPU_PREFETCH = 1


class StreamingLoader(DeviceLoader):
    """Transfer the batches of a `BatchLoader` to the device, augment and normalize them there.

    On a GPU this runs on a separate CUDA stream and overlaps with training. With DataLoader workers, a background
    thread also starts the next transfer as soon as the previous batch is consumed; on a CPU it normalizes. The images
    get the memory format of the model while they are uint8, which takes a fraction of the time.
    """

    def __init__(
        self,
        batches: BatchLoader,
        image_format: ImageFormat,
        device: torch.device,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> None:
        self._loader, self._device, self._memory_format = batches, device, memory_format
        self._mean, self._std = channel_stats(image_format, device)
        if device.type == "cuda":
            self._copy_stream = torch.cuda.Stream(device)
            transfers = self._transfer_all(batches)
            # Without workers, loading draws from the same global generators as the training thread, so it must not run
            # in another thread.
            self._batches: Iterator[DeviceBatch] = map(
                self._wait_for_transfer, PrefetchIterator(transfers, GPU_PREFETCH) if batches.workers else transfers
            )
        else:
            prepared = map(self._prepare, batches)
            self._batches = PrefetchIterator(prepared, CPU_PREFETCH).start() if batches.workers else prepared

    @property
    def workers(self) -> int:
        return self._loader.workers

    @property
    def ready_batches(self) -> int:
        """See `DeviceLoader.ready_batches`."""
        if not self._loader.workers:
            return 0
        return self._loader.ready_batches + (GPU_PREFETCH if self._device.type == "cuda" else CPU_PREFETCH)

    def __next__(self) -> DeviceBatch:
        return next(self._batches)

    def _prepare(self, batch: Batch) -> DeviceBatch:
        images, labels = to_device(batch.images, self._device), to_device(batch.labels, self._device)
        if batch.augment_params is not None:
            images = apply_batch_params(images, batch.augment_params.to(self._device), may_overwrite=True)
        if self._memory_format is not torch.preserve_format:
            images = images.contiguous(memory_format=self._memory_format)
        images = normalize(images, self._mean, self._std)
        return DeviceBatch(images, labels, batch.loss_weight, batch.ends_step, batch.unread)

    def _transfer_all(self, batches: BatchLoader) -> Iterator[tuple[DeviceBatch, torch.cuda.Event]]:
        # The current CUDA device is per thread and starts as device 0.
        torch.cuda.set_device(self._copy_stream.device)
        yield from map(self._transfer, batches)

    def _transfer(self, batch: Batch) -> tuple[DeviceBatch, torch.cuda.Event]:
        """Start the transfer of a batch; returns the batch and an event that the copy stream records after it."""
        with torch.cuda.stream(self._copy_stream):
            device_batch = self._prepare(batch)
            transferred = torch.cuda.Event()
            transferred.record(self._copy_stream)
        return device_batch, transferred

    def _wait_for_transfer(self, transfer: tuple[DeviceBatch, torch.cuda.Event]) -> DeviceBatch:
        """Make the current CUDA stream wait for the transfer, without blocking the host."""
        batch, transferred = transfer
        compute_stream = torch.cuda.current_stream(self._device)
        compute_stream.wait_event(transferred)
        for tensor in (batch.images, batch.labels):
            # The caching allocator must not reuse the memory for a later batch while training still reads it.
            tensor.record_stream(compute_stream)
        return batch


class PrefetchIterator(Generic[T]):
    """Iterate over items in order, with `depth` items prefetched by a background thread.

    The daemon thread starts with `start` or the first `next` call. It ends when the items end or raise an exception,
    which every later `next` call raises again.
    """

    def __init__(self, items: Iterator[T], depth: int = 1) -> None:
        self._items = items
        self._queue: SimpleQueue[T | BaseException] = SimpleQueue()
        self._free = Semaphore(depth)
        self._exception: BaseException | None = None
        self._thread: Thread | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def start(self) -> Self:
        """Start to prefetch."""
        if self._thread is None:
            self._thread = Thread(target=self._produce, name="prefetch", daemon=True)
            self._thread.start()
        return self

    def __next__(self) -> T:
        if self._exception is not None:
            raise self._exception
        self.start()
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._exception = item
            raise item
        self._free.release()
        return item

    def _produce(self) -> None:
        try:
            while True:
                # Not before an item is consumed: more prefetched batches would only use device memory.
                self._free.acquire()
                self._queue.put(next(self._items))
        except BaseException as error:
            self._queue.put(error)
