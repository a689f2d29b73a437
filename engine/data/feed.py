"""The batches of a run, from before there is a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.config import Config
from engine.data.device import DeviceBatch, DeviceBatches, StreamedBatches
from engine.data.fixed import FixedBatches
from engine.data.held import hold
from engine.data.loader import Batches
from engine.data.memory import MemoryBatches
from engine.data.pipeline import Choice
from engine.data.sampler import BatchRequest
from engine.data.source import ArraySource, ImageFormat, Source


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
