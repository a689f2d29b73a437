"""Batches on the device that trains on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.data.loader import Batches
from engine.data.source import ImageFormat
from engine.data.transforms import normalise


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


class StreamedBatches:
    """What loader processes make, or this process itself, brought to the device."""

    def __init__(self, batches: Batches, image_format: ImageFormat, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self.workers = batches.workers
        shape = (1, image_format.channels, 1, 1)
        self._mean = torch.tensor(image_format.mean, device=device).view(shape)
        self._std = torch.tensor(image_format.std, device=device).view(shape)

    def __next__(self) -> DeviceBatch:
        batch = next(self._batches)
        images, labels = batch.images, batch.labels
        if self._device.type == "cuda":
            images, labels = images.pin_memory(), labels.pin_memory()
        images = normalise(images.to(self._device, non_blocking=True), self._mean, self._std)
        labels = labels.to(self._device, non_blocking=True)
        return DeviceBatch(images, labels, batch.weight, batch.ends_step, batch.unread)
