"""The input pipeline of a run, created before the process initializes its device.

`engine.training.train` and the batch size search create it; `engine.data.pipelines.choose` selects the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from engine.config.schema import Config
from engine.data.pipelines.choose import PipelineChoice
from engine.data.pipelines.device import DeviceBatch, DeviceLoader, StreamingLoader
from engine.data.pipelines.in_memory_images import load_in_memory
from engine.data.pipelines.loader import BatchLoader
from engine.data.pipelines.memory import InMemoryLoader
from engine.data.sampler import BatchRequest, Part
from engine.data.sources.array import ArraySource
from engine.data.sources.base import ImageFormat, ImageSource
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.jpeg import decoder_warning


class InputPipeline:
    """The images of a rank, their format and the pipeline that loads them: one batch per request. `warnings` are for
    the log.

    With `workers` > 0 the constructor forks the loader processes: create it before the process initializes CUDA or
    starts threads. `devices_per_rank` is that of `BatchLoader`.

    Raises UsageError if the user's transform cannot be loaded. With the memory pipeline, raises
    UnreadableImageError as `load_in_memory` does.
    """

    def __init__(
        self,
        choice: PipelineChoice,
        source: ImageSource,
        config: Config,
        image_format: ImageFormat,
        requests: Iterable[BatchRequest],
        workers: int = 0,
        devices_per_rank: int = 1,
    ) -> None:
        self.choice, self.source, self.image_format = choice, source, image_format
        self._config, self._requests, pipeline = config, requests, choice.pipeline
        self._in_memory = load_in_memory(source, config, image_format) if pipeline == "memory" else None
        self._loader = (
            BatchLoader(source, config, image_format, requests, workers, devices_per_rank)
            if pipeline == "stream"
            else None
        )
        problems = (
            source.warning if isinstance(source, ArraySource) else None,
            self._in_memory.warning if self._in_memory is not None else None,
            decoder_warning() if isinstance(source, EncodedSource) else None,
        )
        self.warnings = [problem for problem in problems if problem]

    def device_loader(
        self, device: torch.device, memory_format: torch.memory_format = torch.preserve_format
    ) -> DeviceLoader:
        """Return the iterator over the batches on a device, for a model of a memory format. Call it once."""
        images, config, requests = self.image_format, self._config, self._requests
        if self._in_memory is not None:
            return InMemoryLoader(self._in_memory, config, images, requests, device, memory_format)
        if self._loader is not None:
            return StreamingLoader(self._loader, images, device, memory_format)

        def load_batch(request: BatchRequest) -> DeviceBatch:
            return next(
                StreamingLoader(BatchLoader(self.source, config, images, [request], 0), images, device, memory_format)
            )

        return FixedBatchLoader(load_batch, requests, images)

    def raise_if_worker_died(self) -> None:
        """Raise LoaderProcessError if a DataLoader worker has died, see `BatchLoader.raise_if_worker_died`."""
        if self._loader is not None:
            self._loader.raise_if_worker_died()


class FixedBatchLoader(DeviceLoader):
    """Repeats one batch per part, to measure training speed without data loading.

    `load` loads the batch of a request to the device. It is called for the first request of a part, and again for a
    larger request, and for an epoch with another size of the training images. Unreadable images are not reported.
    """

    def __init__(
        self,
        load: Callable[[BatchRequest], DeviceBatch],
        requests: Iterable[BatchRequest],
        image_format: ImageFormat,
    ) -> None:
        self._load, self._requests, self._format = load, iter(requests), image_format
        self._first_batch: dict[Part, DeviceBatch] = {}
        # Number of images in the first batch, and the size of the training images.
        self._shape: dict[Part, tuple[int, int]] = {}

    def __next__(self) -> DeviceBatch:
        request = next(self._requests)
        part, count = request.part, len(request.indices)
        loaded_count, loaded_size = self._shape.get(part, (0, 0))
        size = self._format.at_epoch(request.epoch).size if part == "train" else loaded_size
        if loaded_count < count or loaded_size != size:
            self._first_batch[part], self._shape[part] = self._load(request), (count, size)
        first_batch = self._first_batch[part]
        return replace(
            first_batch,
            images=first_batch.images[:count],
            labels=first_batch.labels[:count],
            loss_weight=request.loss_weight,
            ends_step=request.ends_step,
            unread=(),
        )
