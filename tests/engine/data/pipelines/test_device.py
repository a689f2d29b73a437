"""Prefetching and transfer of batches to the device: order, errors, and equality across devices."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from engine.config.loader import resolve_config
from engine.data.pipelines.device import DeviceBatch, PrefetchIterator, StreamingLoader
from engine.data.pipelines.loader import Batch, BatchLoader
from engine.data.sampler import DistributedBatchSampler
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source

VARIED = ["augment.crop_padding=2", "augment.flip=true", "augment.erasing=0.5", "data.channels=3"]


def batches(device: str, workers: int, *overrides: str) -> list[DeviceBatch]:
    config = resolve_config(None, [*VARIED, *overrides]).config
    source = open_source(config)
    images = model_input_format(config, source)
    made = BatchLoader(source, config, images, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(2), workers)
    return list(iter(StreamingLoader(made, images, torch.device(device)).__next__, None))


def read(items: Iterator[int]) -> tuple[list[int], BaseException | None]:
    """Read all items through a `PrefetchIterator`; returns them and the ValueError that ended them, if any."""
    ahead, came = PrefetchIterator(items), []
    try:
        came.extend(ahead)
    except ValueError as error:
        with pytest.raises(ValueError, match="no more"):
            next(ahead)
        return came, error
    assert next(ahead, "end") == "end"
    return came, None


def test_prefetcher_yields_items_in_order_and_ends() -> None:
    assert read(iter(range(50))) == (list(range(50)), None)
    assert read(iter(())) == ([], None)


def test_prefetcher_raises_error_after_preceding_items() -> None:
    def failing() -> Iterator[int]:
        yield from range(3)
        raise ValueError("no more")

    came, error = read(failing())
    assert came == [0, 1, 2]
    assert isinstance(error, ValueError)


def test_prefetcher_makes_one_item_ahead_in_background_thread() -> None:
    made: list[int] = []
    threads, two = set[str](), threading.Event()

    def making() -> Iterator[int]:
        for number in itertools.count():
            threads.add(threading.current_thread().name)
            made.append(number)
            if number == 2:
                two.set()
            yield number

    ahead = PrefetchIterator(making())
    assert made == []
    assert [next(ahead), next(ahead)] == [0, 1]
    assert two.wait(5)
    assert made == [0, 1, 2]
    assert threads == {"next batch"}


def test_streamed_batches_on_cpu_are_normalized_and_independent_of_workers() -> None:
    alone, helped = batches("cpu", 0), batches("cpu", 1)
    assert len(alone) == len(helped) == 2 * (6 + 3)
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
    assert abs(float(torch.cat([batch.images for batch in alone]).mean())) < 0.3
    assert alone[0].images.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_on_gpu_match_cpu(workers: int) -> None:
    made = batches("cuda", workers)
    for one, other in zip(made, batches("cpu", 0), strict=True):
        # A GPU may divide float32 by multiplying with the reciprocal, which differs in the last bit.
        torch.testing.assert_close(one.images.cpu(), other.images, rtol=1e-6, atol=1e-6)
        assert torch.equal(one.labels.cpu(), other.labels)
        assert (one.loss_weight, one.ends_step) == (other.loss_weight, other.ends_step)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_streamed_batches_on_gpu_stay_valid_while_in_use() -> None:
    config = resolve_config(None, VARIED).config
    source = open_source(config)
    images = model_input_format(config, source)
    made = BatchLoader(source, config, images, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(2), 2)
    streamed = StreamingLoader(made, images, torch.device("cuda"))
    busy = torch.rand(4096, 4096, device="cuda")
    sums = []
    for _ in range(18):
        batch = next(streamed)
        for _ in range(4):
            # Keep the GPU busy, so that it falls behind the host by more than the prefetched batch.
            busy = busy @ busy / 4096
        sums.append(batch.images.double().sum())
        del batch
    wanted = [batch.images.double().sum() for batch in batches("cpu", 0)]
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(wanted), rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_streamed_batches_on_gpu_do_not_sync_host() -> None:
    config = resolve_config(None, VARIED).config
    source = open_source(config)
    images = model_input_format(config, source)
    made = BatchLoader(source, config, images, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(1), 1)
    streamed = StreamingLoader(made, images, torch.device("cuda"))
    next(streamed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len([next(streamed) for _ in range(8)]) == 8
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_streamed_batches_prefetch_thread_uses_device_of_its_gpu() -> None:
    config = resolve_config(None, VARIED).config
    source = open_source(config)
    images = model_input_format(config, source)
    current = list[int]()

    class Watched(BatchLoader):
        def __next__(self) -> Batch:
            current.append(torch.cuda.current_device())
            return super().__next__()

    made = Watched(source, config, images, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(1), 1)
    with torch.cuda.device(1):
        assert next(StreamingLoader(made, images, torch.device("cuda", 1))).images.device.index == 1
    assert set(current) == {1}
