"""Devices of a run and its mean time per epoch, in summary.json and in the last line of a headless run."""

from __future__ import annotations

import pytest

from engine.runs.event_lines import event_lines
from engine.runs.events import Event, RunFinished
from engine.runs.history import describe_run_devices, history_from_events
from engine.runs.records import RankDevice
from engine.runs.run_record import RunRecord
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started

H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
FINISHED = RunFinished(time=9.0, state="finished", message="best accuracy 0.9")


def gpu(rank: int, name: str = H200, index: int | None = None, host: str = "h") -> RankDevice:
    return RankDevice(rank, host, 7, f"GPU-{rank}", name, rank if index is None else index)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([gpu(0, index=0), gpu(1, index=3)], "2 x H200 (GPU 0, 3)"),
        ([gpu(0, index=5)], "H200 (GPU 5)"),
        ([gpu(0), gpu(1, A100), gpu(2)], "2 x H200 (GPU 0, 2) and 1 x A100-SXM4-80GB (GPU 1)"),
        ([gpu(0), gpu(1), gpu(2, host="i"), gpu(3, host="i")], "4 x H200 on 2 hosts"),
        ([RankDevice(0, "h", 7, "GPU-0"), RankDevice(1, "h", 8, "GPU-1")], "2 GPUs"),
        ([RankDevice(0, "h", 7, "cpu"), RankDevice(1, "h", 8, "cpu")], "the CPU (2 ranks)"),
        ([RankDevice(0, "h", 7, "cpu")], "the CPU"),
    ],
)
def test_describe_run_devices_names_gpus(ranks: list[RankDevice], text: str) -> None:
    devices = [record.device for record in ranks]
    started = replace(make_run_started(), ranks=ranks, devices=devices, world_size=len(ranks))
    assert describe_run_devices(started) == text


def last_lines(*events: Event) -> tuple[list[str], RunRecord]:
    history = history_from_events(events)
    return event_lines(events[-1], history), history.record()


def test_mean_epoch_time_is_that_of_full_epochs_since_the_resume() -> None:
    epochs = [replace(make_epoch(number), seconds=float(number)) for number in range(1, 5)]
    resumed = make_run_resumed(15, 5.0)
    lines, summary = last_lines(make_run_started(), *epochs[:2], resumed, *epochs[1:], FINISHED)
    assert lines[-1] == "2 epochs since the resume on the CPU (2 ranks), 3.5 s per epoch"
    assert summary.seconds_per_epoch == 3.5
    lines, summary = last_lines(make_run_started(), epochs[0], resumed, epochs[1], FINISHED)
    assert lines[-1] == "finished: best accuracy 0.9"
    assert summary.seconds_per_epoch is None
