"""Batches of tar shards: the same for any number of workers, and after a resume within an epoch."""

from __future__ import annotations

import pytest
import torch

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.data.batching import build_sampler
from engine.data.pipelines.batch import Batch
from engine.data.pipelines.loader import BatchLoader
from engine.data.sources.encoded import EncodedSource
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source
from support.data.tar_shards import write_shards

AUGMENTED = ("augment.resized_crop=true", "augment.flip=true", "augment.brightness=0.3")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("shards"), shards=6, images=12)


def open_shards(shards: str, worker_type: str) -> tuple[Config, EncodedSource]:
    data = ["data.dataset=webdataset", f"data.path={shards}", "data.image_size=16", "data.batch_size=8"]
    overrides = [*data, *AUGMENTED, f"data.worker_type={worker_type}"]
    config = resolve_config(None, overrides).config
    source = open_source(config)
    assert isinstance(source, EncodedSource)
    return config, source


def load(config: Config, source: EncodedSource, workers: int, first_step: int = 0) -> list[Batch]:
    sampler = build_sampler(config, source, 1)
    requests = sampler.requests(2, 1, first_step)
    return list(BatchLoader(source, config, model_input_format(config, source), requests, workers))


@pytest.mark.parametrize(("workers", "worker_type"), [(0, "auto"), (2, "threads"), (4, "threads"), (2, "processes")])
def test_tar_batches_after_resume_continue_epoch(shards: str, workers: int, worker_type: str) -> None:
    config, source = open_shards(shards, worker_type)
    whole, resumed = load(config, source, 0), load(config, source, workers, first_step=3)
    assert len(whole) > 10
    assert len(resumed) == len(whole) - 3
    for batch, other in zip(whole[3:], resumed, strict=True):
        assert torch.equal(batch.images, other.images)
        assert torch.equal(batch.labels, other.labels)
