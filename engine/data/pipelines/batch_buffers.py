"""Shared memory for the images of batches, which a loader process uses again after the rank has released it.

New shared memory costs a page fault for each 4 KiB, which is a tenth of the time to load a photo of 224x224. The
threads of `engine.data.pipelines.decode_threads` write to these buffers, `engine.data.pipelines.loader` receives them.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from engine.data.pipelines.batch import Batch
from engine.data.pipelines.worker_process import exit_unable_to_send


@dataclass(frozen=True)
class NewImages:
    """Uninitialized images of a batch, N x C x size x size uint8, in the buffer `number`, or in memory of their own."""

    pixels: Tensor
    number: int | None


@dataclass(frozen=True)
class SentBatch:
    """A batch on the way to the rank. With `buffer`, its images, of `shape`, are there and not in the batch.

    `memory` is that of the buffer if the rank does not have it yet.
    """

    batch: Batch
    buffer: int | None = None
    shape: tuple[int, ...] = ()
    memory: Tensor | None = None


class BatchBuffers:
    """The buffers of all loader processes of a rank. Create it before the processes are forked.

    A loader process takes buffers (`new_images`) and sends them to the rank (`send`). The rank receives them
    (`receive`); a buffer is free again when the last tensor that shares its memory is gone.

    Each buffer has at least `num_bytes`. With those of the largest batch, none is ever replaced by a larger one, whose
    memory would exist beside the smaller one until the rank receives it. Pages without images take no memory.
    """

    def __init__(self, processes: int, per_process: int, num_bytes: int) -> None:
        self._per_process, self._num_bytes = per_process, num_bytes
        # One byte per buffer: 1 from when the loader process takes it until the rank has released it.
        self._in_use = mmap.mmap(-1, max(processes * per_process, 1))
        self._memory: dict[int, Tensor] = {}
        self._received: set[int] = set()

    def new_images(self, process: int, count: int, channels: int, size: int) -> NewImages:
        """Take a free buffer of a loader process, or allocate memory for one batch if there is none."""
        shape = count, channels, size, size
        first = process * self._per_process
        number = self._in_use.find(b"\0", first, first + self._per_process)
        if number < 0:
            return NewImages(_as_images(shared_memory(prod(shape)), shape), None)
        self._in_use[number] = 1
        memory = self._memory.get(number)
        if memory is None or len(memory) < prod(shape):
            memory = self._memory[number] = shared_memory(max(self._num_bytes, prod(shape)))
            self._received.discard(number)
        return NewImages(_as_images(memory, shape), number)

    def send(self, batch: Batch, images: NewImages) -> SentBatch:
        """Return what to send for a batch whose images were loaded into `images`."""
        number = images.number
        if number is None:
            return SentBatch(batch)
        if batch.images is not images.pixels:
            # Transforms, or the skipped images of the batch, made a copy.
            self._in_use[number] = 0
            return SentBatch(batch)
        memory = None if number in self._received else self._memory[number]
        self._received.add(number)
        without_images = replace(batch, images=torch.empty(0, dtype=torch.uint8))
        return SentBatch(without_images, number, tuple(batch.images.shape), memory)

    def receive(self, sent: SentBatch) -> Batch:
        """Return the batch that a loader process has sent."""
        if sent.buffer is None:
            return sent.batch
        if sent.memory is not None:
            self._memory[sent.buffer] = sent.memory
        pixels = self._memory[sent.buffer].numpy()[: prod(sent.shape)]
        # A tensor keeps the array whose memory it shares, and so do its views.
        weakref.finalize(pixels, self._release, sent.buffer).atexit = False
        return replace(sent.batch, images=_as_images(torch.from_numpy(pixels), sent.shape))

    def _release(self, number: int) -> None:
        self._in_use[number] = 0


def shared_memory(num_bytes: int) -> Tensor:
    """Return uninitialized bytes in shared memory, which torch's queues pass on without a copy."""
    try:
        # As torch's default_collate does in a DataLoader worker.
        storage = torch.UntypedStorage._new_shared(num_bytes)
    except RuntimeError as error:
        exit_unable_to_send(error)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _as_images(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the beginning of the memory as images of N x C x H x W whose channels of a pixel are neighbors, as in the
    files (torch's channels_last)."""
    count, channels, height, width = shape
    return memory[: prod(shape)].view(count, height, width, channels).permute(0, 3, 1, 2)
