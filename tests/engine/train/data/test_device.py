"""Prefetching and transfer of batches to the device: order, errors, and equality across devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.config.loader import resolve_config
from engine.train.data.batch import Batch, DeviceBatch
from engine.train.data.device import prefetch, stream_to_device
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.data.stream import BatchLoader

VARIED = ["augment.crop_padding=2", "augment.flip=true", "augment.erasing=0.5", "data.channels=3"]


def batches(device: str, workers: int, *overrides: str) -> list[DeviceBatch]:
    config = resolve_config(None, [*VARIED, *overrides]).config
    source = open_source(config)
    image_format = model_input_format(config, source)
    loader = BatchLoader(
        source, config, image_format, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(2), workers
    )
    return list(iter(stream_to_device(loader, image_format, torch.device(device)).__next__, None))


def read_all(items: Iterator[int]) -> tuple[list[int], BaseException | None]:
    """Read all items through a `prefetch`; returns them and the ValueError that ended them, if any."""
    prefetcher, received = prefetch(items), []
    try:
        received.extend(prefetcher)
    except ValueError as error:
        return received, error
    assert next(prefetcher, "end") == "end"
    return received, None


def test_prefetcher_raises_error_after_preceding_items() -> None:
    def failing() -> Iterator[int]:
        yield from range(3)
        raise ValueError("no more")

    received, error = read_all(failing())
    assert received == [0, 1, 2]
    assert isinstance(error, ValueError)


def test_streamed_batches_on_cpu_are_normalized_and_independent_of_workers() -> None:
    without_workers, with_worker = batches("cpu", 0), batches("cpu", 1)
    assert len(without_workers) == len(with_worker) == 2 * (6 + 3)
    for batch, other_batch in zip(without_workers, with_worker, strict=True):
        assert torch.equal(batch.images, other_batch.images)
        assert torch.equal(batch.labels, other_batch.labels)
    assert abs(float(torch.cat([batch.images for batch in without_workers]).mean())) < 0.3
    assert without_workers[0].images.dtype == torch.float32


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_streamed_batches_get_memory_format_of_model(memory_format: torch.memory_format) -> None:
    config = resolve_config(None, VARIED).config
    source = open_source(config)
    image_format = model_input_format(config, source)
    loader = BatchLoader(
        source, config, image_format, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(1), 0
    )
    batch = next(stream_to_device(loader, image_format, torch.device("cpu"), memory_format))
    assert batch.images.is_contiguous(memory_format=memory_format)
    assert torch.equal(batch.images, batches("cpu", 0)[0].images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_on_gpu_match_cpu(workers: int) -> None:
    streamed = batches("cuda", workers)
    for batch, expected in zip(streamed, batches("cpu", 0), strict=True):
        # A GPU may divide float32 by multiplying with the reciprocal, which differs in the last bit.
        torch.testing.assert_close(batch.images.cpu(), expected.images, rtol=1e-6, atol=1e-6)
        assert torch.equal(batch.labels.cpu(), expected.labels)
        assert (batch.loss_weight, batch.ends_step) == (expected.loss_weight, expected.ends_step)


@pytest.mark.gpu
@pytest.mark.card  # streams that run concurrently
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_streamed_batches_on_gpu_stay_valid_while_in_use() -> None:
    config = resolve_config(None, VARIED).config
    source = open_source(config)
    image_format = model_input_format(config, source)
    loader = BatchLoader(
        source, config, image_format, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(2), 2
    )
    streamed = stream_to_device(loader, image_format, torch.device("cuda"))
    busy = torch.rand(4096, 4096, device="cuda")
    sums = []
    for _ in range(18):
        batch = next(streamed)
        for _ in range(4):
            # Keep the GPU busy, so that it falls behind the host by more than the prefetched batch.
            busy = busy @ busy / 4096
        sums.append(batch.images.double().sum())
        del batch
    expected = [batch.images.double().sum() for batch in batches("cpu", 0)]
    torch.testing.assert_close(torch.stack(sums).cpu(), torch.stack(expected), rtol=1e-5, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_streamed_batches_on_gpu_do_not_sync_host() -> None:
    config = resolve_config(None, VARIED).config
    source = open_source(config)
    image_format = model_input_format(config, source)
    loader = BatchLoader(
        source, config, image_format, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(1), 1
    )
    streamed = stream_to_device(loader, image_format, torch.device("cuda"))
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
    image_format = model_input_format(config, source)
    devices = list[int]()

    class RecordingLoader(BatchLoader):
        def __next__(self) -> Batch:
            devices.append(torch.cuda.current_device())
            return super().__next__()

    loader = RecordingLoader(
        source, config, image_format, DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(1), 1
    )
    with torch.cuda.device(1):
        streamed = stream_to_device(loader, image_format, torch.device("cuda", 1))
        # To the end: the interpreter waits for a DataLoader worker that still loads.
        assert {next(streamed).images.device.index for _ in range(9)} == {1}
    assert set(devices) == {1}
