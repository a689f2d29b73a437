"""The memory pipeline: slice batches out of decoded images in device memory, or in host memory if they do not fit.

It needs no DataLoader workers, and a step costs the host only a few tensor slices. The images come from
`engine.train.data.decoded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from engine.config.schema import Config
from engine.train.data.augment.augmentation import Augmentation, AugmentParams, apply_batch_params
from engine.train.data.augment.batch_ops import (
    channel_stats,
    convert_to_format,
    labels_to_device,
    normalize,
    resized_crop,
    to_device,
)
from engine.train.data.batch import DeviceBatch, DeviceLoader
from engine.train.data.decoded import CHUNK_BYTES, InMemoryImages
from engine.train.data.sampler import PARTS, BatchRequest, Indices, Part
from engine.train.data.sources.base import ImageFormat, Images

# A request reduced to its readable images, and the read errors of the others.
ReadableRequest = tuple[BatchRequest, tuple[str, ...]]
# Share of a GPU's free memory that the images may use.
MAX_FREE_GPU_MEMORY_SHARE = 0.25
# A GPU prepares several batches together, up to this many bytes of float32 images: for a small batch the kernel
# launches take longer than the kernels.
MAX_PREPARED_BYTES = 64 << 20


class InMemoryLoader(DeviceLoader):
    """Iterator over the device batches of all requests, in order.

    Per-image transforms (policy, color jitter, the user's transform) run in this process and stall the device. All
    other transforms, including `augment.resized_crop` (`batch_ops.resized_crop`), run on the device without a host
    sync. The images get the memory format of the model while they are uint8. Raises UsageError if the user's transform
    cannot be loaded.
    """

    def __init__(
        self,
        in_memory: InMemoryImages,
        config: Config,
        image_format: ImageFormat,
        requests: Iterable[BatchRequest],
        device: torch.device,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> None:
        self._in_memory, self._format, self._device = in_memory, image_format, device
        self._memory_format = memory_format
        self._augmentation = Augmentation(config, image_format)
        self._mean, self._std = channel_stats(image_format, device)
        self._device_images: dict[Part, Tensor] = {}
        size = sum(images.nbytes for images in in_memory.images.values())
        if device.type == "cuda" and size <= MAX_FREE_GPU_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
            # Per-image transforms run on the CPU, so their input stays in host memory.
            parts = [part for part in PARTS if part == "val" or not self._augmentation.has_image_transforms]
            self._device_images = {part: _copy_to_device(in_memory.images[part], device) for part in parts}
        epochs = groupby(requests, lambda request: (request.part, request.epoch))
        self._batches = chain.from_iterable(self._epoch_batches(list(group)) for _, group in epochs)

    def __next__(self) -> DeviceBatch:
        return next(self._batches)

    def _epoch_batches(self, requests: Sequence[BatchRequest]) -> Iterator[DeviceBatch]:
        """Yield the batches of one part in one epoch.

        Random parameters are drawn and labels are copied to the device once per epoch, which removes this work from
        each step.
        """
        part, epoch = requests[0].part, requests[0].epoch
        readable = [self._drop_unreadable(request) for request in requests]
        indices = np.concatenate([request.indices for request, _ in readable])
        drawn = np.concatenate([request.random_indices for request, _ in readable])
        labels = labels_to_device(self._in_memory.labels[part][indices], self._device)
        stored_size = self._in_memory.images[part].shape[-1]
        params = self._augmentation.draw_batch_params(epoch, drawn) if part == "train" else None
        boxes = self._augmentation.crop_boxes(epoch, drawn, stored_size) if part == "train" else None
        for group, rows in self._group_requests(readable, on_device=part in self._device_images):
            images = self._gather(part, indices[rows])
            if params is not None:
                group_boxes = None if boxes is None else boxes[rows]
                images = self._augment(images, epoch, drawn[rows], params[rows], group_boxes)
            if self._memory_format is not torch.preserve_format:
                images = images.contiguous(memory_format=self._memory_format)
            yield from _split_batches(normalize(images, self._mean, self._std), labels[rows], group)

    def _gather(self, part: Part, indices: Indices) -> Tensor:
        """Return images of a part, N x C x H x W uint8, on the device, or on the CPU if per-image transforms follow."""
        if part in self._device_images:
            return self._device_images[part].index_select(0, to_device(torch.from_numpy(indices), self._device))
        images = self._in_memory.images[part]
        shape, pin_memory = (len(indices), *images.shape[1:]), self._device.type == "cuda"
        gathered = torch.empty(shape, dtype=torch.uint8, pin_memory=pin_memory)
        np.take(images, indices, 0, out=gathered.numpy(), mode="clip")
        stays = part == "train" and self._augmentation.has_image_transforms
        return gathered if stays else to_device(gathered, self._device)

    def _augment(
        self, images: Tensor, epoch: int, indices: Indices, params: AugmentParams, boxes: Indices | None
    ) -> Tensor:
        """Crop, resize and augment training images, and return them on the device."""
        image_format = self._format.at_epoch(epoch)
        if boxes is not None:
            device_boxes = to_device(torch.from_numpy(boxes), images.device)
            images = resized_crop(images, device_boxes, image_format.size, image_format.interpolation)
        elif image_format.epoch_sizes:
            images = convert_to_format(images, image_format, training=True)
        images = self._augmentation.apply_image_transforms(images, epoch, indices)
        return apply_batch_params(to_device(images, self._device), params)

    def _group_requests(
        self, readable: Sequence[ReadableRequest], *, on_device: bool
    ) -> Iterator[tuple[Sequence[ReadableRequest], slice]]:
        """Yield groups of requests to prepare together, each with the slice of the epoch's indices that it covers."""
        request, _ = readable[0]
        group_size = 1
        if on_device:
            # Peak memory: float32 images at the larger of the sizes before and after a resized crop.
            size = max(
                self._format.preprocessing(training=request.part == "train").size,
                self._in_memory.images[request.part].shape[-1],
            )
            batch_bytes = 4 * self._format.channels * size**2 * len(request.indices)
            group_size = max(MAX_PREPARED_BYTES // batch_bytes, 1)
        end = 0
        for first in range(0, len(readable), group_size):
            group = readable[first : first + group_size]
            start, end = end, end + sum(len(request.indices) for request, _ in group)
            yield group, slice(start, end)

    def _drop_unreadable(self, request: BatchRequest) -> ReadableRequest:
        """Return the request without its unreadable images. Those that stay with a weight of 0 are black."""
        unreadable, rows = self._in_memory.unread.get(request.part, {}), request.indices.tolist()
        unread = tuple(unreadable[row] for row in rows if row in unreadable)
        if not unread:
            return request, ()
        return request.keep([row not in unreadable for row in rows]), unread


def _split_batches(images: Tensor, labels: Tensor, group: Sequence[ReadableRequest]) -> Iterator[DeviceBatch]:
    end = 0
    for request, unread in group:
        start, end = end, end + len(request.indices)
        yield DeviceBatch(images[start:end], labels[start:end], request.loss_weight, request.ends_step, unread)


def _copy_to_device(images: Images, device: torch.device) -> Tensor:
    """Copy an N x C x H x W uint8 array to the device in chunks of `CHUNK_BYTES`."""
    device_images = torch.empty(images.shape, dtype=torch.uint8, device=device)
    chunk = max(CHUNK_BYTES // images[0].nbytes, 1)
    for first in range(0, len(images), chunk):
        device_images[first : first + chunk] = torch.from_numpy(np.array(images[first : first + chunk]))
    return device_images
