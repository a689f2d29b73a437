"""The batches of a run, from before there is a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from engine.config.schema import Config
from engine.data.pipelines.choose import Choice
from engine.data.pipelines.device import DeviceBatch, DeviceBatches, StreamedBatches
from engine.data.pipelines.in_memory_images import hold
from engine.data.pipelines.loader import Batches
from engine.data.pipelines.memory import MemoryBatches
from engine.data.sampler import BatchRequest, Part
from engine.data.sources.array import ArraySource
from engine.data.sources.base import ImageFormat, Source


class Feed:
    """One batch for each request, by a pipeline. With `workers` > 0 loader processes are started on construction, so
    make it before the process touches CUDA or starts threads. `warnings` are for the log. Raises UsageError where the
    user's own transform cannot be had, UnreadableImageError where an image that is to be held cannot be read."""

    def __init__(
        self,
        choice: Choice,
        source: Source,
        config: Config,
        image_format: ImageFormat,
        requests: Iterable[BatchRequest],
        workers: int = 0,
    ) -> None:
        self._source, self._config, self._format, self._requests = source, config, image_format, requests
        self.choice, pipeline = choice, choice.pipeline
        self._held = hold(source, config, image_format) if pipeline == "memory" else None
        self._loaded = Batches(source, config, image_format, requests, workers) if pipeline == "stream" else None
        problems = (
            source.problem if isinstance(source, ArraySource) else None,
            self._held.problem if self._held is not None else None,
        )
        self.warnings = [problem for problem in problems if problem]

    def on(self, device: torch.device) -> DeviceBatches:
        if self._held is not None:
            return MemoryBatches(self._held, self._config, self._format, self._requests, device)
        if self._loaded is not None:
            return StreamedBatches(self._loaded, self._format, device)

        def bring(request: BatchRequest) -> DeviceBatch:
            loaded = Batches(self._source, self._config, self._format, [request], 0)
            return next(StreamedBatches(loaded, self._format, device))

        return FixedBatches(bring, self._requests)

    def name_the_dead(self) -> None:
        """Raises LoaderProcessError where a loader process has died, see `Batches`."""
        if self._loaded is not None:
            self._loaded.name_the_dead()


class FixedBatches:
    """`bring` brings the batch of a request to the device. One for more images than the first one of its part had takes
    the place of that. Images that cannot be read are not counted."""

    workers = 0

    def __init__(self, bring: Callable[[BatchRequest], DeviceBatch], requests: Iterable[BatchRequest]) -> None:
        self._bring, self._requests = bring, iter(requests)
        self._first: dict[Part, DeviceBatch] = {}
        self._asked = {"train": 0, "val": 0}

    def __next__(self) -> DeviceBatch:
        request = next(self._requests)
        part, count = request.part, len(request.indices)
        if self._asked[part] < count:
            self._first[part], self._asked[part] = self._bring(request), count
        first = self._first[part]
        return replace(
            first,
            images=first.images[:count],
            labels=first.labels[:count],
            weight=request.weight,
            ends_step=request.ends_step,
            unread=(),
        )
