"""Buffers of batches in shared memory: when they are used again, and what the rank receives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from engine.data.pipelines.batch import Batch
from engine.data.pipelines.batch_buffers import BatchBuffers, SentBatch

COUNT, CHANNELS, SIZE = 2, 3, 4
NUM_BYTES = COUNT * CHANNELS * SIZE**2


def load_batch(buffers: BatchBuffers, value: int, *, size: int = SIZE, process: int = 0) -> SentBatch:
    """Load a batch whose pixels have all the same value."""
    images = buffers.new_images(process, COUNT, CHANNELS, size)
    images.pixels.fill_(value)
    return buffers.send(Batch(images.pixels, torch.tensor([0, 1]), 1.0), images)


def constant(value: int, size: int = SIZE) -> Tensor:
    return torch.full((COUNT, CHANNELS, size, size), value, dtype=torch.uint8)


def test_buffers_keep_a_batch_while_a_view_of_it_exists() -> None:
    buffers = BatchBuffers(1, 1, NUM_BYTES)
    view = buffers.receive(load_batch(buffers, 1)).images[1:, 0]
    others = [load_batch(buffers, value) for value in (2, 3)]
    assert [other.buffer for other in others] == [None, None]
    assert torch.equal(view, constant(1)[1:, 0])


def test_buffers_use_released_memory_again() -> None:
    buffers = BatchBuffers(1, 1, NUM_BYTES)
    first = buffers.receive(load_batch(buffers, 1))
    address = first.images.data_ptr()
    del first
    sent = load_batch(buffers, 2)
    assert sent.memory is None, "the rank has it already"
    assert buffers.receive(sent).images.data_ptr() == address


def test_buffers_have_room_for_the_largest_batch_from_the_start() -> None:
    buffers = BatchBuffers(1, 1, COUNT * CHANNELS * 9**2)
    first = buffers.receive(load_batch(buffers, 1))
    address = first.images.data_ptr()
    del first
    sent = load_batch(buffers, 2, size=9)
    assert sent.memory is None, "another buffer would exist beside the first"
    assert buffers.receive(sent).images.data_ptr() == address


def test_buffers_are_free_after_a_batch_with_images_of_its_own() -> None:
    buffers = BatchBuffers(1, 1, NUM_BYTES)
    images = buffers.new_images(0, COUNT, CHANNELS, SIZE)
    transformed = Batch(constant(9), torch.tensor([0, 1]), 1.0)
    assert torch.equal(buffers.receive(buffers.send(transformed, images)).images, constant(9))
    assert load_batch(buffers, 1).buffer == 0


@pytest.fixture
def start_loader() -> Iterator[Callable[[BatchBuffers, list[int]], torch.multiprocessing.Queue[SentBatch]]]:
    """Start a forked process that loads a batch per value, at most one ahead of the rank."""
    context = torch.multiprocessing.get_context("fork")
    done = context.Event()
    processes: list[BaseProcess] = []

    def start(buffers: BatchBuffers, values: list[int]) -> torch.multiprocessing.Queue[SentBatch]:
        sent = context.Queue(maxsize=1)

        def load_all() -> None:
            for value in values:
                sent.put(load_batch(buffers, value))
            # The descriptor of shared memory is fetched from this process.
            done.wait(30)

        processes.append(context.Process(target=load_all, daemon=True))
        processes[-1].start()
        return sent

    yield start
    done.set()
    for process in processes:
        process.join(30)


def test_buffers_never_change_a_batch_that_the_rank_holds(
    start_loader: Callable[[BatchBuffers, list[int]], torch.multiprocessing.Queue[SentBatch]],
) -> None:
    values = np.random.default_rng(0).integers(0, 256, 60).tolist()
    buffers = BatchBuffers(1, 3, NUM_BYTES)
    queue, held = start_loader(buffers, values), []
    for number in range(len(values)):
        held.append((number, buffers.receive(queue.get(timeout=30)).images))
        # One to three batches are in use at a time.
        while len(held) > 1 + number % 3:
            held.pop(0)
        for kept, images in held:
            assert torch.equal(images, constant(values[kept]))
