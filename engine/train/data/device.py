"""The images of a rank on its device: the input pipeline that the plan names, prefetching, copies and normalization.

`engine.train.loop.train` and the batch size search create an `InputPipeline`; `engine.train.data.stream` and
`engine.train.data.memory` supply it with images.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import TypeVar

import torch

from engine.config.schema import Config
from engine.train.data.augment.augmentation import apply_batch_params
from engine.train.data.augment.batch_ops import channel_stats, labels_to_device, normalize, to_device
from engine.train.data.batch import Batch, DeviceBatch, DeviceLoader
from engine.train.data.decoded import load_in_memory
from engine.train.data.memory import InMemoryLoader
from engine.train.data.plan import InputPlan
from engine.train.data.sampler import BatchRequest, Part
from engine.train.data.sources.base import ArraySource, ImageFormat, ImageSource
from engine.train.data.stream import BatchLoader

T = TypeVar("T")


class InputPipeline:
    """The images of a rank, their format and the plan by which they are loaded: one batch per request. `warnings` are
    for the log.

    With `plan.workers` the constructor forks the loader processes: create it before the process initializes CUDA or
    starts threads. `devices_per_rank` is that of `BatchLoader`.

    Raises UsageError if the user's transform cannot be loaded. With the memory pipeline, raises
    UnreadableImageError as `load_in_memory` does.
    """

    def __init__(
        self,
        plan: InputPlan,
        source: ImageSource,
        config: Config,
        image_format: ImageFormat,
        requests: Iterable[BatchRequest],
        devices_per_rank: int = 1,
    ) -> None:
        self.plan, self.source, self.image_format = plan, source, image_format
        self._config, self._requests, self._in_memory, self._loader = config, requests, None, None
        if plan.pipeline == "memory":
            self._in_memory = load_in_memory(source, config, image_format)
        if plan.pipeline == "stream":
            self._loader = BatchLoader(source, config, image_format, requests, plan.workers, devices_per_rank)
        problems = (
            source.warning if isinstance(source, ArraySource) else None,
            self._in_memory.warning if self._in_memory else None,
        )
        self.warnings = [*plan.warnings, *(problem for problem in problems if problem)]

    def device_loader(
        self, device: torch.device, memory_format: torch.memory_format = torch.preserve_format
    ) -> DeviceLoader:
        """Return the iterator over the batches on a device, for a model of a memory format. Call it once."""
        if self._in_memory:
            images, config, requests = self.image_format, self._config, self._requests
            return InMemoryLoader(self._in_memory, config, images, requests, device, memory_format)
        if self._loader:
            return stream_to_device(self._loader, self.image_format, device, memory_format)
        return self._repeat_batch(device, memory_format)

    def _repeat_batch(self, device: torch.device, memory_format: torch.memory_format) -> DeviceLoader:
        """Repeat one batch per part, to measure training speed without data loading.

        The batch of a part is loaded for its first request, and again for a larger request, and for an epoch with
        another size of the training images. Unreadable images are not reported.
        """
        loaded: dict[Part, DeviceBatch] = {}
        for request in self._requests:
            part, count, image_format = request.part, len(request.indices), self.image_format
            size = image_format.at_epoch(request.epoch).preprocessing(training=request.is_training).size
            if part not in loaded or len(loaded[part].images) < count or loaded[part].images.shape[-1] != size:
                batches = BatchLoader(self.source, self._config, image_format, [request], 0)
                loaded[part] = next(stream_to_device(batches, image_format, device, memory_format))
            images, labels = loaded[part].images[:count], loaded[part].labels[:count]
            yield DeviceBatch(images, labels, request.loss_weight, request.ends_step)

    def raise_if_worker_died(self) -> None:
        """Raise LoaderProcessError if a loader process has died, see `BatchLoader.worker_death`."""
        if self._loader is not None and (death := self._loader.worker_death()) is not None:
            raise death


def stream_to_device(
    batches: BatchLoader,
    image_format: ImageFormat,
    device: torch.device,
    memory_format: torch.memory_format = torch.preserve_format,
) -> DeviceLoader:
    """Yield the batches of a `BatchLoader` on the device, augmented and normalized there.

    On a GPU this runs on a separate CUDA stream and overlaps with training. With loader processes, a background thread
    also starts the next transfer as soon as the previous batch is consumed. The images get the memory format of the
    model while they are uint8, which takes a fraction of the time.
    """
    mean, std = channel_stats(image_format, device)

    def prepare(batch: Batch) -> DeviceBatch:
        images, labels = to_device(batch.images, device), labels_to_device(batch.labels, device)
        if batch.augment_params is not None:
            images = apply_batch_params(images, batch.augment_params, may_overwrite=True)
        if memory_format is not torch.preserve_format:
            images = images.contiguous(memory_format=memory_format)
        images = normalize(images, mean, std)
        return DeviceBatch(images, labels, batch.loss_weight, batch.ends_step, batch.unread)

    if device.type != "cuda":
        return map(prepare, batches)
    copy_stream = torch.cuda.Stream(device)

    def transfer(batch: Batch) -> tuple[DeviceBatch, torch.cuda.Event]:
        """Start the transfer of a batch; return the batch and an event that the copy stream records after it."""
        with torch.cuda.stream(copy_stream):
            device_batch, transferred = prepare(batch), torch.cuda.Event()
            transferred.record(copy_stream)
        return device_batch, transferred

    def transfer_all() -> Iterator[tuple[DeviceBatch, torch.cuda.Event]]:
        # The current CUDA device is per thread and starts as device 0.
        torch.cuda.set_device(copy_stream.device)
        # No name here may keep a batch in device memory.
        yield from map(transfer, batches)

    def receive(sent: tuple[DeviceBatch, torch.cuda.Event]) -> DeviceBatch:
        """Make the current CUDA stream wait for the transfer, without blocking the host."""
        batch, transferred = sent
        compute_stream = torch.cuda.current_stream(device)
        compute_stream.wait_event(transferred)
        for tensor in (batch.images, batch.labels):
            # The caching allocator must not reuse the memory for a later batch while training still reads it.
            tensor.record_stream(compute_stream)
        return batch

    # Without workers, loading draws from the same global generators as the training thread, so it must not run in
    # another thread.
    return map(receive, prefetch(transfer_all()) if batches.workers else transfer_all())


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield items in order, with one prefetched by a background thread, and raise the exception that ends them."""
    queue: SimpleQueue[T | BaseException] = SimpleQueue()
    consumed = Semaphore()

    def produce() -> None:
        try:
            while True:
                # Not before an item is consumed: more prefetched batches would only use device memory.
                consumed.acquire()
                queue.put(next(items))
        except BaseException as error:
            queue.put(error)

    Thread(target=produce, name="prefetch", daemon=True).start()
    while not isinstance(item := queue.get(), BaseException):
        consumed.release()
        yield item
    if not isinstance(item, StopIteration):
        raise item
