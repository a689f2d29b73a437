"""Batches cut out of images that lie in memory, the device's own where they fit: no process is waited for, and a step's
work on the host is a few slices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from engine.config.schema import Config
from engine.data.augment.augmentation import Augmentation, vary
from engine.data.augment.batch_ops import cut, normalise
from engine.data.pipelines.device import DeviceBatch, bring
from engine.data.pipelines.in_memory_images import PARTS, PIECE_BYTES, Held
from engine.data.sampler import BatchRequest, Indices, Part
from engine.data.sources.base import ImageFormat, Images

# What of a batch could not be read.
Unread = tuple[str, ...]
# Of a GPU's free memory, for the images.
OF_GPU = 0.25
# A GPU prepares many batches at once, up to so many bytes of images: of a small one it would spend more time on being
# told what to do than on doing it.
AHEAD_BYTES = 64 << 20


class MemoryBatches:
    """One batch for each request, in order. What is done to images one by one (a policy, colour jitter, the user's own
    transform) is done in this process while the device waits; the rest is done on the device, which is not waited for.
    Parts cut out by augment.resized_crop are brought to their size there too (`transforms.cut`). Raises UsageError
    where the user's own transform cannot be had."""

    workers = 0

    def __init__(
        self,
        held: Held,
        config: Config,
        image_format: ImageFormat,
        requests: Iterable[BatchRequest],
        device: torch.device,
    ) -> None:
        self._held, self._format, self._device = held, image_format, device
        self._augmentation = Augmentation(config, image_format)
        shape = (1, image_format.channels, 1, 1)
        self._mean = torch.tensor(image_format.mean, device=device).view(shape)
        self._std = torch.tensor(image_format.std, device=device).view(shape)
        self._resident: dict[Part, Tensor] = {}
        if device.type == "cuda" and held.bytes <= OF_GPU * torch.cuda.mem_get_info(device)[0]:
            parts = PARTS if not self._augmentation.one_by_one else PARTS[1:]
            self._resident = {part: _moved(held.images[part], held.rows[part], device) for part in parts}
        self._batches = self._all(requests)

    def __next__(self) -> DeviceBatch:
        return next(self._batches)

    def _all(self, requests: Iterable[BatchRequest]) -> Iterator[DeviceBatch]:
        for _, group in groupby(requests, lambda request: (request.part, request.epoch)):
            yield from self._epoch(list(group))

    def _epoch(self, requests: Sequence[BatchRequest]) -> Iterator[DeviceBatch]:
        """All of an epoch's requests for a part: what is drawn for its images is drawn, and moved, at once."""
        part, epoch, augmentation = requests[0].part, requests[0].epoch, self._augmentation
        readable = [self._readable(request) for request in requests]
        indices = np.concatenate([request.indices for request, _ in readable])
        labels = bring(torch.from_numpy(self._held.labels[part][indices]), self._device)
        places = bring(torch.from_numpy(indices), self._device) if part in self._resident else None
        draws = boxes = None
        if part == "train":
            draws = augmentation.draws(epoch, indices).to(self._device)
            boxes = augmentation.boxes(epoch, indices, self._held.images[part].shape[-1])
            if boxes is not None and not augmentation.one_by_one:
                boxes = bring(boxes, self._device)
        for some, rows in self._together(readable, on_device=places is not None):
            if places is not None:
                images = self._resident[part].index_select(0, places[rows])
            else:
                images = self._gathered(part, indices[rows])
                if part == "val" or not augmentation.one_by_one:
                    images = bring(images, self._device)
            if boxes is not None:
                images = cut(images, boxes[rows], self._format.size)
            if draws is not None:
                images = vary(bring(augmentation.before(images, epoch, indices[rows]), self._device), draws[rows])
            yield from _divided(normalise(images, self._mean, self._std), labels[rows], some)

    def _together(
        self, readable: Sequence[tuple[BatchRequest, Unread]], *, on_device: bool
    ) -> Iterator[tuple[Sequence[tuple[BatchRequest, Unread]], slice]]:
        """Requests whose images are prepared at once, and where those lie among all."""
        request, _ = readable[0]
        # Floats, of the size before a part is cut out or after it.
        side = max(self._format.size, self._held.images[request.part].shape[-1])
        image_bytes = 4 * self._format.channels * side**2
        many = AHEAD_BYTES // (image_bytes * len(request.indices)) if on_device else 1
        end = 0
        for first in range(0, len(readable), max(many, 1)):
            some = readable[first : first + max(many, 1)]
            start, end = end, end + sum(len(request.indices) for request, _ in some)
            yield some, slice(start, end)

    def _readable(self, request: BatchRequest) -> tuple[BatchRequest, Unread]:
        """What can be read of a request, as `RequestedBatches` leaves images out; those are black."""
        if not self._held.unread:
            return request, ()
        rows = self._held.rows[request.part][request.indices].tolist()
        unread = tuple(self._held.unread[row] for row in rows if row in self._held.unread)
        if not unread:
            return request, ()
        kept = request.indices[[row not in self._held.unread for row in rows]]
        weight = request.weight * len(kept) / len(rows)
        least = min(2, len(rows)) if request.part == "train" else 1
        if len(kept) < least:
            kept, weight = request.indices[:least], 0.0
        return replace(request, indices=kept, weight=weight), unread

    def _gathered(self, part: Part, indices: Indices) -> Tensor:
        """Images on the host, where a GPU can fetch them by itself."""
        images = self._held.images[part]
        made = torch.empty((len(indices), *images.shape[1:]), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        np.take(images, self._held.rows[part][indices], 0, out=made.numpy(), mode="clip")
        return made


def _divided(images: Tensor, labels: Tensor, readable: Sequence[tuple[BatchRequest, Unread]]) -> Iterator[DeviceBatch]:
    end = 0
    for request, unread in readable:
        start, end = end, end + len(request.indices)
        yield DeviceBatch(images[start:end], labels[start:end], request.weight, request.ends_step, unread)


def _moved(images: Images, rows: Indices, device: torch.device) -> Tensor:
    """Those rows on the device, moved a piece at a time."""
    moved = torch.empty((len(rows), *images.shape[1:]), dtype=torch.uint8, device=device)
    many = max(PIECE_BYTES // images[0].nbytes, 1)
    for first in range(0, len(rows), many):
        moved[first : first + many] = torch.from_numpy(images[rows[first : first + many]])
    return moved
