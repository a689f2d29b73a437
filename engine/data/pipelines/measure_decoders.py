"""Measure how fast the CPU and the GPU decode the first images of a run, for `data.decoder=auto`.

`engine.training.input_choice` calls it on rank 0, once the device is initialized.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import floor, log10

import torch

from engine.data.pipelines.batch import Batch, BatchDataset, EncodedRows, PendingBatch
from engine.data.pipelines.batch_buffers import BatchBuffers
from engine.data.pipelines.choose_decoder import DecoderChoice
from engine.data.pipelines.decode_threads import PendingPixels
from engine.data.pipelines.encoded_batch import PendingEncodedBatch
from engine.data.pipelines.gpu_decoder import DecoderUnavailableError, GpuDecoder, check_nvjpeg
from engine.data.rng import single_torch_thread
from engine.data.sampler import BatchRequest
from engine.data.sources.encoded import EncodedSource
from engine.utils.text import pluralize
from engine.utils.units import format_bytes

SAMPLE_IMAGES = 64
MIN_SPEEDUP = 1.2  # of the GPU, which training needs too
MIN_PLAIN_SHARE = 0.5  # of the images that the GPU can decode
GPU_REPEATS = 3
# Of the encoded images of a batch to the pixels for which the rank has checked the shared memory
# (`engine.data.limits`). Larger photos take gigabytes there.
MAX_SIZE_RATIO = 2.0


def measure_decoders(
    source: EncodedSource, dataset: BatchDataset, request: BatchRequest, device: torch.device, workers: int
) -> DecoderChoice:
    """Return the faster decoder for the images of a request, with `workers` threads or DataLoader workers.

    The workers read and cut the files for the GPU, which is no faster than they are. They are timed in CPU seconds,
    because other processes of the run start at the same time. Returns the CPU if an image is unreadable.
    """
    sample = BatchRequest(request.part, request.epoch, request.indices[:SAMPLE_IMAGES])
    try:
        with single_torch_thread():
            load_seconds, pixels = _load(lambda: PendingPixels(source, dataset, sample, BatchBuffers(1, 0, 0), 0))
            prepare_seconds, batch = _load(lambda: PendingEncodedBatch(source, dataset, sample))
    except Exception:
        # The error recurs during training, where it is reported with the failing image.
        return DecoderChoice("cpu", "the first images cannot be read")
    count, encoded = len(pixels.labels), batch.encoded
    if encoded is None or len(encoded.rows) < MIN_PLAIN_SHARE * count:
        plain = 0 if encoded is None else len(encoded.rows)
        return DecoderChoice("cpu", f"only {plain} of the first {count} images are baseline JPEG files")
    mean_bytes, pixel_bytes = len(encoded.data) / len(encoded.rows), pixels.images[0].numel()
    if mean_bytes > MAX_SIZE_RATIO * pixel_bytes:
        sizes = f"are {format_bytes(mean_bytes)} on average, the pixels of a crop {format_bytes(pixel_bytes)}"
        return DecoderChoice("cpu", f"the first files {sizes}: gputrain data pack makes them smaller")
    try:
        check_nvjpeg(device)
    except DecoderUnavailableError as error:
        return DecoderChoice("cpu", str(error))
    try:
        decode_seconds = _decode_seconds(GpuDecoder(source, dataset, device), batch, encoded, device)
    except torch.OutOfMemoryError:
        return DecoderChoice("cpu", "nvJPEG needs more memory than the GPU has free")
    cpu_rate, gpu_rate = workers * count / load_seconds, count / max(decode_seconds, prepare_seconds / workers)
    threads = pluralize(workers, "CPU thread")
    rates = f"nvJPEG decodes {_shown(gpu_rate)} images/s, {threads} {_shown(cpu_rate)}"
    return DecoderChoice("gpu" if gpu_rate >= MIN_SPEEDUP * cpu_rate else "cpu", rates)


def _load(start: Callable[[], PendingBatch]) -> tuple[float, Batch]:
    """Load a batch in this thread; return its CPU time in seconds and the batch. The first time imports libraries and
    fills the page cache, so it does not count."""
    for pending in (start(), start()):
        began = time.thread_time()
        batch = pending.load()
        seconds = time.thread_time() - began
    return seconds, batch


def _decode_seconds(decoder: GpuDecoder, batch: Batch, encoded: EncodedRows, device: torch.device) -> float:
    """Return how long the GPU takes for a batch, in seconds: the shortest of some attempts after the first."""
    batch = replace(batch, images=batch.images.to(device))
    seconds = []
    for _ in range(1 + GPU_REPEATS):
        began = time.perf_counter()
        decoder(batch, encoded)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _shown(rate: float) -> str:
    """Return a rate rounded to two digits, or to an integer below 100."""
    return f"{round(rate, min(1 - floor(log10(rate)), 0)):,.0f}"
