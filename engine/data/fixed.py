"""The first batch of each part again and again: what a step costs that waits for no data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from engine.data.device import DeviceBatch
from engine.data.sampler import BatchRequest, Part


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
