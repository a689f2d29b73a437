"""The first batch of each part again and again: what a step costs that waits for no data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from engine.data.device import DeviceBatch
from engine.data.sampler import BatchRequest, Part


class FixedBatches:
    """`bring` brings the batch of a request to the device. A request for more images than the first one of its part had
    is brought in its place."""

    workers = 0

    def __init__(self, bring: Callable[[BatchRequest], DeviceBatch], requests: Iterable[BatchRequest]) -> None:
        self._bring, self._requests = bring, iter(requests)
        self._first: dict[Part, DeviceBatch] = {}

    def __next__(self) -> DeviceBatch:
        request = next(self._requests)
        part, count = request.part, len(request.indices)
        if part not in self._first or len(self._first[part].labels) < count:
            self._first[part] = self._bring(request)
        first = self._first[part]
        return replace(
            first,
            images=first.images[:count],
            labels=first.labels[:count],
            weight=request.weight,
            ends_step=request.ends_step,
        )
