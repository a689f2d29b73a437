"""Collect the batches that an input pipeline yields, and compare two lists of them."""

from __future__ import annotations

import torch

from engine.config.pipeline import PipelineName
from engine.config.schema import Config
from engine.train.data.batch import DeviceBatch
from engine.train.data.checks import build_sampler
from engine.train.data.device import InputPipeline
from engine.train.data.plan import InputPlan
from engine.train.data.sampler import DistributedBatchSampler
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.formats import model_input_format

CPU = torch.device("cpu")


def batches(
    pipeline: PipelineName,
    config: Config,
    source: ImageSource,
    shares: DistributedBatchSampler | None = None,
    first: tuple[int, int] = (1, 0),
    device: torch.device = CPU,
) -> list[DeviceBatch]:
    """Return the batches of two epochs."""
    shares = shares or build_sampler(config, source, 1)
    loader = InputPipeline(
        InputPlan(pipeline, ""), source, config, model_input_format(config, source), shares.requests(2, *first)
    ).device_loader(device)
    return [next(loader) for _ in shares.requests(2, *first)]


def assert_the_same(actual: list[DeviceBatch], expected: list[DeviceBatch], within: float = 0.0) -> None:
    assert len(actual) == len(expected) > 0
    for batch, other in zip(actual, expected, strict=True):
        assert (batch.loss_weight, batch.ends_step, batch.unread) == (other.loss_weight, other.ends_step, other.unread)
        assert torch.equal(batch.labels, other.labels)
        assert batch.images.shape == other.images.shape
        assert batch.images.dtype == other.images.dtype == torch.float32
        assert float((batch.images - other.images).abs().max()) <= within
