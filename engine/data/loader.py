"""From batch requests to batches: in this process, or in loader processes that work ahead."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from engine.config import Config
from engine.data.sampler import BatchRequest
from engine.data.source import ImageFormat, Source
from engine.data.transforms import augment, fit
from engine.process import die_with_parent


@dataclass(frozen=True)
class Batch:
    """`images` N x C x H x W, uint8; `labels` N, int64; `weight` as in BatchRequest."""

    images: Tensor
    labels: Tensor
    weight: float


class RequestedBatches(Dataset[Batch]):
    """Answers a BatchRequest with its batch."""

    def __init__(self, source: Source, config: Config, image_format: ImageFormat) -> None:
        self._source, self._config, self._format = source, config, image_format

    def __getitem__(self, request: BatchRequest) -> Batch:
        pixels, labels = self._source.load(request.part, request.indices)
        images = fit(torch.from_numpy(pixels), self._format)
        if request.part == "train":
            images = augment(images, self._config.data, self._config.run.seed, request.epoch, request.indices)
        return Batch(images, torch.from_numpy(labels), request.weight)


def stream_batches(
    source: Source, config: Config, image_format: ImageFormat, requests: Iterable[BatchRequest], workers: int
) -> Iterator[Batch]:
    """One batch for each request, in order. With `workers` > 0 loader processes are forked in this call, so make it
    before the process touches CUDA or starts threads; one set of them serves the whole run."""
    dataset = RequestedBatches(source, config, image_format)
    if workers == 0:
        return (dataset[request] for request in requests)
    loader: DataLoader[Batch] = DataLoader(
        dataset,
        batch_size=None,
        sampler=requests,
        num_workers=workers,
        collate_fn=_as_it_is,
        multiprocessing_context="fork",
        prefetch_factor=config.data.prefetch,
        worker_init_fn=partial(_become_worker, os.getpid()),
        generator=torch.Generator().manual_seed(config.run.seed),
    )
    return iter(loader)


def _as_it_is(batch: Any) -> Any:
    return batch


def _become_worker(rank: int, _: int) -> None:
    """A loader process ends with its rank, and leaves it to the rank to answer a signal that was sent to all."""
    die_with_parent(rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
