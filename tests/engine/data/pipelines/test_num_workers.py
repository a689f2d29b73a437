"""The number of DataLoader workers follows from the time to load a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from engine.config.loader import resolve_config
from engine.data.pipelines import num_workers
from engine.data.pipelines.batch import Batch, BatchDataset
from engine.data.pipelines.num_workers import measure_batch_seconds, measure_num_workers
from engine.data.sampler import BatchRequest
from engine.data.sources.base import UnreadableImageError
from engine.data.sources.formats import model_input_format
from engine.data.sources.open import open_source

REQUEST = BatchRequest("train", 1, np.arange(64))


@dataclass
class SlowDataset(BatchDataset):
    """Takes `seconds` per image, and `first` more for the first request. `num_loaded` counts the images."""

    seconds: float
    first: float = 0.0
    num_loaded: int = 0
    elapsed_seconds: ClassVar[float] = 0.0

    def __getitem__(self, request: BatchRequest) -> Batch:
        SlowDataset.elapsed_seconds += len(request.indices) * self.seconds + (0 if self.num_loaded else self.first)
        self.num_loaded += len(request.indices)
        return Batch(torch.empty(0), torch.empty(0), 1.0)


@pytest.fixture
def made_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `SlowDataset` advance the clock, so that no result depends on the load of this host."""
    monkeypatch.setattr(SlowDataset, "elapsed_seconds", 0.0)
    monkeypatch.setattr(num_workers.time, "perf_counter", lambda: SlowDataset.elapsed_seconds)


@pytest.mark.usefixtures("made_clock")
@pytest.mark.parametrize(("seconds", "workers"), [(0.0004, 3), (0.0009, 6), (0.01, 8)])
def test_measured_workers_keep_up_with_short_steps(seconds: float, workers: int) -> None:
    assert measure_num_workers(SlowDataset(seconds), REQUEST, 8) == workers
    assert measure_num_workers(SlowDataset(seconds), REQUEST, 1) == 1


@pytest.mark.usefixtures("made_clock")
def test_measure_batch_seconds_ignores_slow_start_and_stops_early_on_slow_images() -> None:
    assert measure_batch_seconds(SlowDataset(0.0005, first=0.2), REQUEST) == pytest.approx(64 * 0.0005)
    slow = SlowDataset(0.02)
    assert measure_batch_seconds(slow, REQUEST) == pytest.approx(64 * 0.02)
    assert slow.num_loaded == 5


def test_measured_workers_is_maximum_when_measurement_fails() -> None:
    class Bad(SlowDataset):
        def __getitem__(self, request: BatchRequest) -> Batch:
            raise UnreadableImageError("gone")

    assert measure_num_workers(Bad(0), REQUEST, 4) == 4


def test_measured_workers_restores_rng_state_and_threads() -> None:
    config = resolve_config(None, ["augment.policy=trivialaugment", "data.channels=3"]).config
    source = open_source(config)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    assert measure_num_workers(BatchDataset(source, config, model_input_format(config, source)), REQUEST, 4) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
