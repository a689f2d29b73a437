"""Timing of data wait and forward passes, on the CPU and with CUDA events."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from engine.base.codec import UNSET
from engine.runs.records import RankEpochTiming
from engine.train.loop.clock import Clock, data_wait_share


def test_clock_separates_waiting_forward_and_stopped_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("engine.train.loop.clock.time.perf_counter", lambda: now.seconds)
    clock = Clock(torch.device("cpu"))
    for waited, forward in ((2.0, 4.0), (3.0, 5.0)):
        clock.begin_step(1)
        clock.begin("data")
        now.seconds += waited
        clock.begin("forward")
        now.seconds += forward
        clock.begin("backward")
        clock.end_step()
    seconds = clock.part_seconds()
    assert (seconds["data"], seconds["forward"]) == (5.0, 9.0)
    assert (clock.epoch_seconds(), clock.throughput(70)) == (14.0, (10.0, 0.3571))
    with clock.stopped():
        now.seconds += 100.0
    assert (clock.epoch_seconds(), clock.throughput(70)) == (14.0, (0.0, 0.0))
    clock.start_epoch()
    assert not any(clock.part_seconds().values())


def test_data_wait_share_averages_all_ranks() -> None:
    ranks = [
        RankEpochTiming(rank, seconds=10.0, data_wait_seconds=waited, forward_seconds=1.0)
        for rank, waited in enumerate((1, 4))
    ]
    assert data_wait_share(ranks) == 0.25
    assert data_wait_share([]) is UNSET
    assert data_wait_share([RankEpochTiming(0, 0.0, 0.0, 0.0)]) is UNSET


@pytest.mark.gpu
@pytest.mark.card  # the device works while the host does
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_clock_on_gpu_counts_waiting_only_when_idle() -> None:
    device, clock = torch.device("cuda"), Clock(torch.device("cuda"))
    values = torch.rand(8192, 8192, device=device)
    values @ values
    torch.cuda.synchronize()

    def batches(seconds: float, products: int) -> tuple[float, float, float]:
        clock.start_epoch()
        start = time.perf_counter()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(10):
            clock.begin("data")
            time.sleep(seconds)
            clock.begin("forward")
            for _ in range(products):
                values @ values
            clock.begin("backward")
        torch.cuda.set_sync_debug_mode("default")
        seconds_of = clock.part_seconds()
        return seconds_of["data"], seconds_of["forward"], time.perf_counter() - start

    # The host prepares the next batch while the device is busy.
    waited, forward, whole = batches(0.001, 10)
    assert waited < 0.1 * whole
    assert forward > 0.8 * whole
    waited, forward, whole = batches(0.2, 1)
    assert waited > 0.8 * whole
