"""Batches on the CPU and on the device, and how the CPU batch of a request is built: load its images, and augment those
of training.

`engine.train.data.stream` builds batches in the rank, in DataLoader workers or in threads, and
`engine.train.data.device` transfers them. `engine.train.data.memory` makes those of images in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from engine.base.errors import UsageError
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.config.user_errors import UserCodeError
from engine.train.data.augment.augmentation import Augmentation, AugmentParams, fork_rngs
from engine.train.data.augment.batch_ops import convert_to_format
from engine.train.data.sampler import BatchRequest, Indices, RandomStream, random_bits
from engine.train.data.sources.base import (
    EncodedSource,
    ImageFormat,
    ImageSource,
    ItemSource,
    Labels,
    UnreadableImageError,
)
from engine.train.data.sources.formats import Preprocessing
from engine.train.data.sources.image import empty_images


@dataclass(frozen=True)
class Batch:
    """A CPU batch: `images`, N x C x H x W uint8 (float32 if `ImageFormat.is_float`), and `labels`, the targets as
    the source has them (`Labels`).

    All but the images are no tensors: DataLoader workers send a tensor as a shared-memory file and a socket connection.
    `loss_weight` and `ends_step` are those of its `BatchRequest`. `unread` names each skipped image and the reason.
    `augment_params` are the batch transforms still to apply on the device; None for validation. `readable` has the
    indices of the images if any was skipped.
    """

    images: Tensor
    labels: Labels
    loss_weight: float
    ends_step: bool = True
    unread: tuple[str, ...] = ()
    augment_params: AugmentParams | None = None
    readable: Indices | None = None


@dataclass(frozen=True)
class DeviceBatch:
    """A batch on the device: normalized `images`, N x C x H x W float32, and `labels`: classes, N int64, or other
    targets, N x C float32.

    `loss_weight` and `ends_step` are those of its `BatchRequest`. `unread` names each skipped image and the reason.
    """

    images: Tensor
    labels: Tensor
    loss_weight: float
    ends_step: bool = True
    unread: tuple[str, ...] = ()


DeviceLoader = Iterator[DeviceBatch]
"""Yields the device batches of all requests, in order."""


class BatchDataset(Dataset[Batch]):
    """Map-style dataset whose index is a `BatchRequest` and whose item is the whole batch.

    Raises UsageError on construction if the user's transform cannot be loaded.
    """

    def __init__(self, source: ImageSource, config: Config, image_format: ImageFormat) -> None:
        self._source, self._config, self._format = source, config, image_format
        self._augmentation = Augmentation(config, image_format)

    def __getitem__(self, request: BatchRequest) -> Batch:
        source, preprocessing, part = self._source, self.preprocessing(request), request.part
        if not isinstance(source, ItemSource):
            pixels, targets = source.load(part, request.indices, preprocessing)
            return self.finish(request, torch.from_numpy(pixels), targets, {})
        images, errors = empty_images(*self.image_shape(request), dtype=source.format.dtype), dict[int, Exception]()
        # To get the labels of a user dataset, which are classes, may read all of its items.
        is_encoded = isinstance(source, EncodedSource)
        labels = source.get_labels(part)[request.indices] if is_encoded else np.zeros(len(images), np.int64)
        with self._seeded_items(request) as seed:
            for row, index in enumerate(request.indices.tolist()):
                seed(row)
                try:
                    labels[row] = source.load_into(images[row], part, index, preprocessing)
                except UnreadableImageError as error:
                    errors[row] = error
        return self.finish(request, torch.from_numpy(images), labels, errors)

    def preprocessing(self, request: BatchRequest) -> Preprocessing:
        """Return how the source crops and resizes the images of a request."""
        if request.is_training:
            return self._augmentation.preprocessing(request.epoch, request.random_offset)
        return self._source.format.preprocessing(training=False)

    def image_shape(self, request: BatchRequest) -> tuple[int, int, int, int]:
        """Return the shape of the images of a request before they are augmented, N x C x H x W."""
        size = self.preprocessing(request).size
        return len(request.indices), self._source.format.channels, size, size

    def finish(self, request: BatchRequest, images: Tensor, labels: Labels, errors: Mapping[int, Exception]) -> Batch:
        """Augment the loaded images of a request as far as that is done on the CPU, without the rows that failed.

        `errors` says why these did. Without any row, the images are black and have a weight of 0 (see
        `BatchRequest.keep`). Raises the first error unless `data.on_bad` says to skip unreadable images.
        """
        others = [row for row, error in errors.items() if not isinstance(error, UnreadableImageError)]
        if errors and (others or self._config.data.on_bad == "fail"):
            raise errors[min(others or errors)]
        if errors:
            readable = np.array([row not in errors for row in range(len(request.indices))])
            request = request.keep(readable.tolist())
            if (count := len(request.indices)) == readable.sum():
                images, labels = images[torch.from_numpy(readable)], labels[readable]
            else:
                images, labels = torch.zeros_like(images[:count]), np.zeros_like(labels[:count])
        augment_params = None
        if self._source.in_memory:
            images = convert_to_format(images, self._format.at_epoch(request.epoch), training=request.is_training)
        if request.is_training:
            images = self._augmentation.apply_image_transforms(images, request.epoch, request.random_indices)
            augment_params = self._augmentation.draw_batch_params(request.epoch, request.random_indices)
        unread = tuple(str(errors[row]) for row in sorted(errors))
        weight, ends_step, kept = request.loss_weight, request.ends_step, request.indices if unread else None
        return Batch(images, labels, weight, ends_step, unread, augment_params, kept)

    @contextmanager
    def _seeded_items(self, request: BatchRequest) -> Iterator[Callable[[int], None]]:
        """Yield what to call before each row of a request is loaded: the item of a user dataset may draw random
        numbers."""
        if not is_user_code(self._config.data.dataset):
            yield lambda row: None
            return
        drawn = request.indices + request.random_offset
        bits = random_bits(self._config.run.seed, RandomStream.USER_ITEM, request.epoch, drawn)
        with fork_rngs() as seed_rng:
            yield lambda row: seed_rng(bits[row])


def load_checked(dataset: BatchDataset, request: BatchRequest) -> Batch:
    """Return the batch of a request. Raises UsageError for an unreadable image, and for a transform that fails."""
    try:
        return dataset[request]
    except UnreadableImageError as error:
        raise UsageError.one("data.dataset", str(error), code=error.code) from error
    except UserCodeError as error:
        reason = str(error).removeprefix("augment.transform ")
        raise UsageError.one("augment.transform", reason, code=error.code) from error
