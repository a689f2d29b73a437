"""Prefetching and transfer of batches to the device: order, errors, and equality across devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.config.loader import resolve_config
from engine.train.data.batch import Batch, DeviceBatch, DeviceLoader
from engine.train.data.device import prefetch, stream_to_device
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.formats import model_input_format
from engine.train.data.sources.open import open_source
from engine.train.data.stream import BatchLoader

VARIED = ["augment.crop_padding=2", "augment.flip=true", "augment.erasing=0.5", "data.channels=3"]


def stream(
    device: torch.device,
    workers: int,
    *,
    epochs: int = 2,
    memory_format: torch.memory_format = torch.contiguous_format,
    loader: type[BatchLoader] = BatchLoader,
) -> DeviceLoader:
    """Open a stream of varied batches to a device."""
    config = resolve_config(None, VARIED).config
    source = open_source(config)
    image_format = model_input_format(config, source)
    requests = DistributedBatchSampler(96, 37, 16, 0, 1, True, 0).requests(epochs)
    return stream_to_device(
        loader(source, config, image_format, requests, workers), image_format, device, memory_format
    )


def batches(device: str, workers: int) -> list[DeviceBatch]:
    return list(iter(stream(torch.device(device), workers).__next__, None))


def test_prefetcher_raises_error_after_preceding_items() -> None:
    def failing() -> Iterator[int]:
        yield from range(3)
        raise ValueError("no more")

    prefetcher = prefetch(failing())
    assert [next(prefetcher) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        next(prefetcher)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_streamed_batches_get_memory_format_of_model(memory_format: torch.memory_format) -> None:
    batch = next(stream(torch.device("cpu"), 0, epochs=1, memory_format=memory_format))
    assert batch.images.is_contiguous(memory_format=memory_format)
    assert torch.equal(batch.images, batches("cpu", 0)[0].images)


@pytest.mark.gpu
@pytest.mark.card  # streams that run concurrently
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_streamed_batches_on_gpu_stay_valid_while_in_use() -> None:
    streamed = stream(torch.device("cuda"), 2)
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
    streamed = stream(torch.device("cuda"), 1, epochs=1)
    next(streamed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len([next(streamed) for _ in range(8)]) == 8
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_streamed_batches_prefetch_thread_uses_device_of_its_gpu() -> None:
    devices = list[int]()

    class RecordingLoader(BatchLoader):
        def __next__(self) -> Batch:
            devices.append(torch.cuda.current_device())
            return super().__next__()

    with torch.cuda.device(1):
        streamed = stream(torch.device("cuda", 1), 1, epochs=1, loader=RecordingLoader)
        # To the end: the interpreter waits for a DataLoader worker that still loads.
        assert {next(streamed).images.device.index for _ in range(9)} == {1}
    assert set(devices) == {1}
