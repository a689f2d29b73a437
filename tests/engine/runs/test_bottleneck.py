"""Bottleneck diagnosis: each kind is provoked by its cause, and missing inputs give no diagnosis."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.base.codec import encode
from engine.runs.bottleneck import BottleneckKind, model_flops_utilization
from engine.runs.events import EpochEvent, Event, GpuEvent
from engine.runs.folder import RunFolder
from engine.runs.history import History, history_from_events
from engine.runs.records import GpuSample
from engine.runs.run_record import stored_form
from engine.train.loop.train import run_training
from support.gputrain_command import Gputrain
from support.replace import replace
from support.runs.event_factories import make_epoch
from support.runs.factories import make_gpu_run_started, make_rank_timings, make_timed_epoch
from support.runs.in_process import single_rank_trainer


def bottleneck_message(*events: Event) -> str:
    bottleneck = history_from_events(events).bottleneck
    return "" if bottleneck is None else bottleneck.message


def kind(history: History) -> BottleneckKind | None:
    return history.bottleneck.kind if history.bottleneck else None


# Real runs.


def train_history(*overrides: str) -> History:
    events: list[Event] = []
    with single_rank_trainer("run.epochs=2", *overrides, events=events) as fit:
        assert run_training(fit, []) == "finished"
    return history_from_events(events)


def user_code(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text("import time\nimport torch\nfrom torch import nn\n" + text)
    return f"run.code={folder}"


def test_bottleneck_is_data_for_slow_transform(tmp_path: Path) -> None:
    code = user_code(tmp_path, "slow_transform", "def change(image):\n    time.sleep(0.0005)\n    return image\n")
    history = train_history(
        "augment.transform=slow_transform:change", code, "data.batch_size=64", "data.val_split=0.7", "model.name=linear"
    )
    assert kind(history) is BottleneckKind.DATA
    wait = history.epochs[-1].data_wait
    assert 0.8 < wait < 1
    [timing] = history.epochs[-1].rank_timings
    assert timing.data_wait_seconds / timing.seconds == pytest.approx(wait, abs=0.01)
    assert timing.data_wait_seconds > 0.0005 * 64 * history.epochs[-1].step / 2
    summary = json.loads(encode(stored_form(history.record())))
    assert summary["data_wait"] == wait
    assert history.started is not None
    message = bottleneck_message(history.started, history.epochs[-1])
    assert summary["bottleneck"] == {"kind": "waiting for data", "message": message}


def test_bottleneck_is_compute_for_ordinary_cpu_run() -> None:
    history = train_history("data.image_size=32", "data.batch_size=64", "data.val_split=0.8")
    assert kind(history) is BottleneckKind.COMPUTE, history.bottleneck
    assert bottleneck_message(*[history.started, history.epochs[-1]]).startswith("CPU-bound")  # type: ignore[list-item]
    assert history.record().values.get("mfu") is None


@pytest.mark.nightly
def test_bottleneck_names_straggler_with_slow_forward_pass(gputrain: Gputrain) -> None:
    gputrain.inject_fault("slow", 1, *range(1, 100))
    done = gputrain("run", "--headless", "digits", "--ranks", "2", "--epochs", "2", "--name", "a")
    assert done.returncode == 0, done.stderr
    summary = json.loads((gputrain.runs / "a" / "summary.json").read_text())
    assert summary["bottleneck"]["kind"] == "waiting for a slow rank"
    assert summary["bottleneck"]["message"].startswith("waiting for rank 1 (cpu): its forward pass takes ")
    fast, slow = RunFolder(gputrain.runs / "a").history().epochs[-1].rank_timings
    assert slow.forward_seconds > fast.forward_seconds + 0.05 * 20


# Recorded events.


LESS = "smaller images or fewer augmentations"


@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        ({"workers": 2, "cores": 4}, f"all CPU cores in use: try {LESS}"),
        (
            {"workers": 2, "cores": 4, "pipeline": "stream", "pipeline_auto": False},
            f"all CPU cores in use: try data.pipeline=auto, {LESS}",
        ),
        ({"workers": 2, "cores": 5}, "try data.workers=5"),
        ({"workers": 0, "pipeline": "memory"}, f"try {LESS}"),
    ],
)
def test_bottleneck_data_recommends_no_workers_beyond_cores(loader: dict[str, Any], advice: str) -> None:
    message = bottleneck_message(make_gpu_run_started(**loader), make_timed_epoch(data_wait=0.6))
    assert message == f"waiting for data 60% of the time; {advice}"


@pytest.mark.parametrize(
    ("ranks", "data_wait", "message"),
    [
        (
            [(0.1, 3.0), (0.1, 2.9), (0.1, 6.0), (0.1, 3.1)],
            0.01,
            "waiting for rank 2 (GPU-2): its forward pass takes 2.0x the median",
        ),
        (
            [(0.1, 3.0), (0.1, 2.9), (4.0, 3.0), (0.1, 3.1)],
            0.1,
            "waiting for rank 2 (GPU-2): it waits for data 40% of the time",
        ),
        ([(0.1, 3.0), (0.1, 2.9), (0.1, 3.7), (0.1, 3.1)], 0.01, "GPU-bound"),
        ([(0.1, 0.5), (0.1, 0.9)], 0.01, "GPU-bound"),
        ([(3, 3), (3, 3), (6, 3)], 0.4, "waiting for data 40%"),
    ],
    ids=["slow", "waits for data", "hardly slower", "small cost", "all ranks wait"],
)
def test_bottleneck_names_straggler(ranks: list[tuple[float, float]], data_wait: float, message: str) -> None:
    epoch = make_timed_epoch(rank_timings=make_rank_timings(*ranks), data_wait=data_wait)
    assert bottleneck_message(make_gpu_run_started(), epoch).startswith(message)


def test_bottleneck_straggler_requires_consecutive_epochs() -> None:
    fast, slow = make_timed_epoch(), make_timed_epoch(rank_timings=make_rank_timings(*[(0.1, 3.0)] * 3, (0.1, 6.0)))
    epochs = [replace(slow, epoch=2), replace(fast, epoch=3), replace(slow, epoch=4), replace(slow, epoch=5)]
    assert bottleneck_message(make_gpu_run_started(), *epochs).startswith("GPU-bound")
    assert bottleneck_message(make_gpu_run_started(), *epochs, replace(slow, epoch=6)).startswith("waiting for rank 3")


def gpu_events(times: Sequence[float], *reasons: str, clock: int = 1410, gpu: int = 0) -> list[Event]:
    sample = GpuSample(f"GPU-{gpu}", "h", throttle=["idle", *reasons], sm_clock=clock, max_sm_clock=1980)
    return [GpuEvent(time=sampled_at, gpus=[sample]) for sampled_at in times]


def test_bottleneck_names_throttled_gpu_with_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    hot = gpu_events((70, 75, 80, 85), "power cap", "thermal")
    assert (
        bottleneck_message(make_gpu_run_started(), *hot, make_timed_epoch())
        == "GPU-0 (rank 0) throttled by heat since 00:01, now at 1410 MHz"
    )
    capped = gpu_events((75, 80, 85), "power cap", gpu=3)
    assert "GPU-3 (rank 3) throttled by power since" in bottleneck_message(
        make_gpu_run_started(), *capped, make_timed_epoch()
    )
    assert "GPU-0 (rank 0) and 1 more throttled" in bottleneck_message(
        make_gpu_run_started(), *hot, *capped, make_timed_epoch()
    )
    assert "since 1970-01-01 00:01" in bottleneck_message(make_gpu_run_started(), *hot, make_timed_epoch(time=90_000.0))
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    "events",
    [
        gpu_events((80, 85), "thermal"),
        gpu_events((70, 75, 80), "thermal") + gpu_events((85,)),
        gpu_events((70, 75), "thermal") + gpu_events((80,)) + gpu_events((85, 90), "thermal"),
        gpu_events((70, 75, 80, 85), "power cap", clock=1965),
        gpu_events((70, 75, 80, 85), "set clocks"),
    ],
    ids=["two samples", "ended", "not consecutive", "full clock", "clock set by user"],
)
def test_bottleneck_ignores_gpu_without_lasting_throttling(events: list[Event]) -> None:
    assert bottleneck_message(make_gpu_run_started(), *events, make_timed_epoch()).startswith("GPU-bound")


def test_bottleneck_blames_throttled_gpu_for_straggler() -> None:
    slow = make_timed_epoch(rank_timings=make_rank_timings((0.1, 3), (0.1, 3), (0.1, 5)))
    assert bottleneck_message(make_gpu_run_started(), *gpu_events((70, 75, 80), "thermal", gpu=2), slow).startswith(
        "GPU-2 (rank 2) throttled by heat"
    )
    assert bottleneck_message(make_gpu_run_started(), *gpu_events((70, 75, 80), "thermal", gpu=1), slow).startswith(
        "waiting for rank 2 (GPU-2)"
    )


def test_mfu_counts_all_gpus() -> None:
    # ResNet-50 needs 12.3 GFLOPs per image, forward and backward; four H100 peak at 4 x 989.4 TFLOPS.
    started = make_gpu_run_started(flops=12.3e9, peak_tflops=3957.6)
    assert model_flops_utilization(started, make_timed_epoch(images_per_second=12_000.0)) == pytest.approx(
        0.0373, abs=1e-4
    )
    record = history_from_events([started, make_timed_epoch(images_per_second=100_000.0)]).record()
    assert record.values["mfu"] == 0.3108
    assert model_flops_utilization(make_gpu_run_started(flops=12.3e9), make_timed_epoch()) is None
    assert model_flops_utilization(make_gpu_run_started(peak_tflops=989.4), make_timed_epoch()) is None


NOTHING: Any = None


@pytest.mark.parametrize(
    "epoch",
    [
        make_epoch(2, time=100.0),
        make_timed_epoch(data_wait=NOTHING),
        make_timed_epoch(data_wait=-1.0),
        make_timed_epoch(images_per_second=NOTHING),
        make_timed_epoch(images_per_second=0.0),
    ],
    ids=["old journal", "null", "negative", "no rate", "zero rate"],
)
def test_bottleneck_is_none_for_unknown_values(epoch: EpochEvent) -> None:
    assert bottleneck_message(make_gpu_run_started(), epoch) == ""
