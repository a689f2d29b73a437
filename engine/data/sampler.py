"""Which images go where: split, order and shares, each a pure function of the seed, the epoch and the image.

Nothing here keeps state, so the answer is the same for any number of loader processes and after a resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Part = Literal["train", "val"]
PARTS: tuple[Part, ...] = ("train", "val")
_UINT64_MASK = 0xFFFFFFFFFFFFFFFF


class RandomStream(IntEnum):
    """What a random number is for; each use draws from a stream of its own."""

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


def _splitmix64(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _UINT64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    return value ^ (value >> 31)


def random_bits(seed: int, stream: RandomStream, epoch: int, indices: Indices) -> NDArray[np.uint64]:
    """64 random bits for each image: the same function as `_splitmix64`, taken over the whole array."""
    key = np.uint64(_splitmix64(_splitmix64(_splitmix64(seed) ^ int(stream)) ^ epoch))
    value = (indices.astype(np.uint64) ^ key) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def image_random_bits(seed: int, stream: RandomStream, epoch: int, index: int) -> int:
    """The same of one image."""
    return _splitmix64(_splitmix64(_splitmix64(_splitmix64(seed) ^ int(stream)) ^ epoch) ^ index)


def batch_random_bits(seed: int, stream: RandomStream, epoch: int, batch_index: int, rank: int) -> int:
    """64 random bits for a batch of a rank."""
    bits = _splitmix64(_splitmix64(_splitmix64(seed) ^ int(stream)) ^ epoch)
    return _splitmix64(_splitmix64(bits ^ batch_index) ^ rank)


def random_integers(high: int, seed: int, stream: RandomStream, epoch: int, indices: Indices) -> Indices:
    """A whole number from 0 to `high` - 1 for each image."""
    return (random_bits(seed, stream, epoch, indices) % np.uint64(high)).astype(np.int64)


def epoch_permutation(num_images: int, seed: int, epoch: int) -> Indices:
    """The order in which an epoch goes through the training images."""
    return np.argsort(random_bits(seed, RandomStream.SHUFFLE, epoch, np.arange(num_images)), kind="stable")


def stratified_split(labels: NDArray[np.integer], val_split: float, seed: int) -> tuple[Indices, Indices]:
    """Indices for training and for validation, ascending; `val_split` of each class is for validation, at least one
    image where the class has two, and never all."""
    chosen: list[Indices] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        wanted = min(max(round(len(members) * val_split), 1), len(members) - 1)
        chosen.append(members[np.argsort(random_bits(seed, RandomStream.SPLIT, 0, members), kind="stable")[:wanted]])
    val = np.sort(np.concatenate(chosen))
    return np.setdiff1d(np.arange(len(labels)), val), val


@dataclass(frozen=True)
class BatchRequest:
    """One batch of one rank: `indices` into the images of `part`. `loss_weight` scales its mean loss so that the mean
    over the ranks, summed over the batches of a step, is the mean over all images of the step; it is 0 for a rank that
    only keeps the others company. `ends_step` is false where more batches are to come before the weights are
    changed."""

    part: Part
    epoch: int
    indices: Indices
    loss_weight: float = 1.0
    ends_step: bool = True

    def keep(self, readable: Sequence[bool]) -> BatchRequest:
        """Return the request without the images that cannot be read; its weight falls with their share.

        Where too few are left to train BatchNorm on, the first images stay and weigh nothing: the other ranks wait
        for a batch of this one.
        """
        min_images = min(2, len(self.indices)) if self.part == "train" else 1
        if sum(readable) < min_images:
            return replace(self, indices=self.indices[:min_images], loss_weight=0.0)
        kept = self.indices[np.asarray(readable)]
        return replace(self, indices=kept, loss_weight=self.loss_weight * len(kept) / len(self.indices))


@dataclass(frozen=True)
class DistributedBatchSampler:
    """How the images of both parts are dealt out to the ranks. `batch_size` images are a rank's, for all of its
    devices."""

    train_images: int
    val_images: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    seed: int
    accumulate: int = 1
    """Batches of a rank that make one step."""
    devices_per_rank: int = 1

    @property
    def num_devices(self) -> int:
        """Devices that share a step, which is what `optim.lr_scaling` goes by."""
        return self.world_size * self.devices_per_rank

    @property
    def global_batch(self) -> int:
        """Images of a step."""
        return self.batch_size * self.world_size * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.train_images, self.global_batch)
        return full + (1 if rest and not self.drop_last else 0)

    @property
    def dropped_images(self) -> int:
        """Training images of which an epoch makes no use, because they fill no step."""
        return self.train_images % self.global_batch if self.drop_last else 0

    def images_from_step(self, first_step: int) -> int:
        """Images of an epoch's steps from step `first_step` (counted from 0) on, over all ranks."""
        trained = self.steps_per_epoch * self.global_batch if self.drop_last else self.train_images
        return max(trained - first_step * self.global_batch, 0)

    @property
    def min_batch_size(self) -> int:
        """Images of the smallest batch that any rank gets in training."""
        rest = self.train_images % self.global_batch
        if self.drop_last or rest == 0:
            return self.batch_size
        return max(rest // self.world_size // self._batches_per_rank(rest), 1)

    def _batches_per_rank(self, images: int) -> int:
        """Batches of each rank that a step of so many images takes."""
        return -(-images // (self.world_size * self.batch_size))

    def train_requests(self, epoch: int, first_step: int = 0) -> Iterator[BatchRequest]:
        """This rank's batches of an epoch from step `first_step` (counted from 0) on. The images of a step are the same
        for any number of ranks that share it, and of batches that make it up."""
        order = epoch_permutation(self.train_images, self.seed, epoch)
        for step in range(first_step, self.steps_per_epoch):
            images = order[step * self.global_batch : (step + 1) * self.global_batch]
            mine = np.array_split(images, self.world_size)[self.rank]
            batches = np.array_split(mine, self._batches_per_rank(len(images)))
            for number, batch in enumerate(batches, 1):
                weight = len(batch) * self.world_size / len(images)
                ends = number == len(batches)
                yield BatchRequest("train", epoch, batch if len(batch) else images[:1], weight, ends)

    def val_requests(self) -> Iterator[BatchRequest]:
        """This rank's batches of an evaluation, which is its first device's alone. Over the ranks each image comes
        exactly once."""
        mine, batch = np.array_split(np.arange(self.val_images), self.world_size)[self.rank], self.batch_size
        batch //= self.devices_per_rank
        for start in range(0, len(mine), batch):
            yield BatchRequest("val", 0, mine[start : start + batch])

    def requests(self, epochs: int, first_epoch: int = 1, first_batch: int = 0) -> Iterator[BatchRequest]:
        """Everything that this rank will ask for, from a position to the end of the run: training and evaluation in
        turn, so that loader processes prepare the next part while this one ends."""
        for epoch in range(first_epoch, epochs + 1):
            yield from self.train_requests(epoch, first_batch if epoch == first_epoch else 0)
            yield from self.val_requests()
