"""Train/validation split, epoch order and batches per rank.

All of it is a pure function of seed, epoch, rank and image index. Without state, the batches are the same for any
number of DataLoader workers and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val")
"""Those of every dataset. A folder may also have test images, which are evaluated once at the end of a run."""
_UINT64_MASK = 0xFFFFFFFFFFFFFFFF


class RandomStream(IntEnum):
    """Independent random streams, one for each use of random numbers. The values are part of every derived seed."""

    SPLIT = 1
    SHUFFLE = 2
    CROP_ROW = 3
    CROP_COLUMN = 4
    FLIP = 5
    RESIZED_CROP_SHAPE = 6
    POLICY = 7
    COLOR_JITTER = 8
    USER_TRANSFORM = 9
    ERASING = 10
    USER_ITEM = 11
    MIXUP = 12
    ERASING_SHAPE = 13
    ERASING_POSITION = 14
    RESIZED_CROP_POSITION = 15
    VERTICAL_FLIP = 16
    AFFINE = 17
    GRAYSCALE = 18
    BLUR = 19
    BALANCED_CLASS = 20
    BALANCED_IMAGE = 21


def _splitmix64(value: int) -> int:
    """SplitMix64 output function (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _UINT64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=256)
def _epoch_key(seed: int, stream: RandomStream, epoch: int) -> int:
    """Return the bits from which those of the images of an epoch derive."""
    return _splitmix64(_splitmix64(_splitmix64(seed) ^ int(stream)) ^ epoch)


def random_bits(seed: int, stream: RandomStream, epoch: int, indices: Indices) -> NDArray[np.uint64]:
    """Return 64 random bits per image, uint64 of shape (N,): `image_random_bits` vectorized over `indices`."""
    key = np.uint64(_epoch_key(seed, stream, epoch))
    value = indices.astype(np.uint64)
    # In place: with a million images each temporary array takes 10 MB.
    value ^= key
    value += np.uint64(0x9E3779B97F4A7C15)
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


def image_random_bits(seed: int, stream: RandomStream, epoch: int, index: int) -> int:
    """Return the 64 random bits of one image."""
    return _splitmix64(_epoch_key(seed, stream, epoch) ^ index)


def batch_random_bits(seed: int, stream: RandomStream, epoch: int, batch_index: int, rank: int) -> int:
    """Return 64 random bits for one batch of a rank."""
    return _splitmix64(_splitmix64(_epoch_key(seed, stream, epoch) ^ batch_index) ^ rank)


def random_integers(high: int, seed: int, stream: RandomStream, epoch: int, indices: Indices) -> Indices:
    """Return a random integer in [0, high) per image, int64 of shape (N,)."""
    return (random_bits(seed, stream, epoch, indices) % np.uint64(high)).astype(np.int64)


def epoch_permutation(num_images: int, seed: int, epoch: int) -> Indices:
    """Return the shuffled order of the training images of an epoch."""
    return np.argsort(random_bits(seed, RandomStream.SHUFFLE, epoch, np.arange(num_images)), kind="stable")


def balanced_order(labels: NDArray[np.number], seed: int, epoch: int) -> Indices:
    """Return as many images as there are labels, drawn with replacement so that each class is equally likely.

    The distribution is that of torch's WeightedRandomSampler with weights inverse to the size of the class.
    """
    by_class, positions = np.argsort(labels, kind="stable"), np.arange(len(labels))
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    drawn = random_integers(len(counts), seed, RandomStream.BALANCED_CLASS, epoch, positions)
    bits = random_bits(seed, RandomStream.BALANCED_IMAGE, epoch, positions)
    order: Indices = by_class[starts[drawn] + (bits % counts[drawn].astype(np.uint64)).astype(np.int64)]
    return order


def stratified_split(labels: NDArray[np.number], val_split: float, seed: int) -> tuple[Indices, Indices]:
    """Return the ascending indices of the training and validation images.

    A share of `val_split` of each class is for validation: at least one image if the class has two, and never all.
    Images with other targets than a class, one row each, count as one class.
    """
    if labels.ndim > 1:
        labels = np.zeros(len(labels), np.int64)
    bits = random_bits(seed, RandomStream.SPLIT, 0, np.arange(len(labels)))
    # One order for all classes, instead of a search per class: ImageNet has 1,000 classes of 1,300 images.
    by_bits = np.argsort(bits, kind="stable")
    # NumPy sorts 16-bit integers by radix.
    small_labels = labels[by_bits].astype(np.min_scalar_type(labels.max(initial=0)))
    order = by_bits[np.argsort(small_labels, kind="stable")]
    starts = np.flatnonzero(np.diff(labels[order], prepend=-1))
    counts = np.diff(starts, append=len(labels))
    # rint rounds half to even, as round() does.
    num_val = np.minimum(np.maximum(np.rint(counts * val_split).astype(np.int64), 1), counts - 1)
    place_in_class = np.arange(len(labels)) - np.repeat(starts, counts)
    is_val = np.empty(len(labels), np.bool_)
    is_val[order] = place_in_class < np.repeat(num_val, counts)
    return np.flatnonzero(~is_val), np.flatnonzero(is_val)


@dataclass(frozen=True)
class BatchRequest:
    """One batch of one rank: `indices` into the images of `part`.

    `loss_weight` scales the mean loss of the batch. DDP averages over ranks and gradient accumulation sums over
    batches; with the weights the result is the mean over all images of the step. It is 0 on a rank that has no image
    left and joins only the all-reduce. `ends_step` is false for all but the last micro-batch of a step.

    `random_offset` tells the draws of an image in the steps of an epoch apart, if it is in several of them.
    """

    part: Part
    epoch: int
    indices: Indices
    loss_weight: float = 1.0
    ends_step: bool = True
    random_offset: int = 0

    @property
    def random_indices(self) -> Indices:
        """The indices from which the random numbers of the images derive."""
        return self.indices + self.random_offset

    @property
    def is_training(self) -> bool:
        """Whether the images are augmented. An evaluation of training images has epoch 0."""
        return self.part == "train" and self.epoch > 0

    def keep(self, readable: Sequence[bool]) -> BatchRequest:
        """Return the request without its unreadable images, with `loss_weight` reduced in proportion.

        If fewer images are readable than BatchNorm needs for training (two), the first images stay with a weight of 0:
        the other ranks wait for this rank in the all-reduce.
        """
        min_images = min(2, len(self.indices)) if self.part == "train" else 1
        if sum(readable) < min_images:
            return replace(self, indices=self.indices[:min_images], loss_weight=0.0)
        kept = self.indices[np.asarray(readable)]
        return replace(self, indices=kept, loss_weight=self.loss_weight * len(kept) / len(self.indices))


@dataclass(frozen=True)
class DistributedBatchSampler:
    """Batches of one rank for training and validation. `batch_size` is per rank, over all devices of the rank."""

    train_images: int
    val_images: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    seed: int
    accumulate: int = 1
    """Micro-batches per step (gradient accumulation)."""
    devices_per_rank: int = 1
    balanced_labels: NDArray[np.number] | None = field(default=None, compare=False, repr=False)
    """Classes of the training images to draw with equal probability; None shuffles the images."""

    @property
    def num_devices(self) -> int:
        """Number of devices over all ranks, the factor of `optim.lr_scaling`."""
        return self.world_size * self.devices_per_rank

    @property
    def global_batch(self) -> int:
        """Global batch size: images per optimizer step, over all ranks and micro-batches."""
        return self.batch_size * self.world_size * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps per epoch."""
        full_steps, remainder = divmod(self.train_images, self.global_batch)
        return full_steps + (1 if remainder and not self.drop_last else 0)

    @property
    def dropped_images(self) -> int:
        """Number of training images that `drop_last` drops in each epoch."""
        return self.train_images % self.global_batch if self.drop_last else 0

    def images_from_step(self, first_step: int) -> int:
        """Number of training images of an epoch from step `first_step` (0-based) on, over all ranks."""
        trained = self.steps_per_epoch * self.global_batch if self.drop_last else self.train_images
        return max(trained - first_step * self.global_batch, 0)

    @property
    def min_batch_size(self) -> int:
        """Size of the smallest training batch of any rank."""
        remainder = self.train_images % self.global_batch
        if self.drop_last or remainder == 0:
            return self.batch_size
        return max(remainder // self.world_size // self._batches_per_rank(remainder), 1)

    def _batches_per_rank(self, images: int) -> int:
        """Number of micro-batches per rank in a step of `images` images."""
        return -(-images // (self.world_size * self.batch_size))

    def train_requests(self, epoch: int, first_step: int = 0) -> Iterator[BatchRequest]:
        """Yield this rank's training batches of an epoch from step `first_step` (0-based) on.

        With equal global batch sizes, a step has the same images for any number of ranks and micro-batches.
        """
        labels = self.balanced_labels
        order = (
            epoch_permutation(self.train_images, self.seed, epoch)
            if labels is None
            else balanced_order(labels, self.seed, epoch)
        )
        for step in range(first_step, self.steps_per_epoch):
            images = order[step * self.global_batch : (step + 1) * self.global_batch]
            rank_images = np.array_split(images, self.world_size)[self.rank]
            batches = np.array_split(rank_images, self._batches_per_rank(len(images)))
            random_offset = 0 if labels is None else step * self.train_images
            for number, batch in enumerate(batches, 1):
                weight = len(batch) * self.world_size / len(images)
                ends = number == len(batches)
                yield BatchRequest("train", epoch, batch if len(batch) else images[:1], weight, ends, random_offset)

    def repeated_train_requests(self, steps: int) -> Iterator[BatchRequest]:
        """Yield this rank's training batches of at least `steps` steps, epoch after epoch, without validation."""
        for epoch in range(1, -(-steps // self.steps_per_epoch) + 1):
            yield from self.train_requests(epoch)

    def evaluation_requests(self, part: Part, num_images: int) -> Iterator[BatchRequest]:
        """Yield this rank's batches of all images of a part. Over all ranks each image appears exactly once.

        Evaluation uses only the first device of a rank, so batches have the per-device size.
        """
        rank_images, batch = np.array_split(np.arange(num_images), self.world_size)[self.rank], self.batch_size
        batch //= self.devices_per_rank
        for start in range(0, len(rank_images), batch):
            yield BatchRequest(part, 0, rank_images[start : start + batch])

    def requests(self, epochs: int, first_epoch: int = 1, first_batch: int = 0) -> Iterator[BatchRequest]:
        """Yield the training and validation batches of all epochs from a position to the end of the run.

        One iterator for both parts lets DataLoader workers prefetch the next part while the current one ends.
        """
        for epoch in range(first_epoch, epochs + 1):
            yield from self.train_requests(epoch, first_batch if epoch == first_epoch else 0)
            yield from self.evaluation_requests("val", self.val_images)
