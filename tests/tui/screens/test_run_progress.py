"""Progress, results and ranks of a run on its screen."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from engine.runs.events import (
    EpochEvent,
    Event,
    GpuEvent,
    PhaseChanged,
    RankFailed,
    RunFinished,
    RunPaused,
)
from engine.runs.folder import RunFolder
from engine.runs.ownership import Ownership
from engine.runs.records import GpuSample, RankDevice
from support.gpu.fake_gpu_host import FakeGpuHost, gpu_line, sample_gpus
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started, make_step
from support.runs.factories import make_gpu_run_started, make_run_folder
from tui.charts.meter import SQUARE
from tui.pollers.runs import RunPoller, RunSnapshot
from tui.screens.run_progress import failure_lines, progress_line
from tui.tables.log_lines import log_lines
from tui.tables.ranks import rank_lines

GIB = 2**30


def polled(folder: RunFolder) -> RunSnapshot:
    poller = RunPoller(folder)
    poller.poll()
    assert poller.latest is not None
    return poller.latest


def live_progress(root: Path, *events: Event) -> str:
    folder = make_run_folder(root, "live", *events)
    owner = Ownership(folder)
    try:
        return progress_line(polled(folder).row, 100).plain
    finally:
        owner.release()


def util_at(time: float, util: float) -> GpuEvent:
    return GpuEvent(
        time=time,
        gpus=[GpuSample("GPU-0", "h", "ok", util=util, memory_used=30 * GIB, temperature=60, power=300.0)],
    )


def test_progress_line_shows_step_of_pause(tmp_path: Path) -> None:
    line = live_progress(tmp_path, make_run_started(), make_step(10), make_epoch(1), RunPaused(step=17, epoch=2))
    assert "paused   epoch 2/3   step 7/10" in line and "57%" in line


def test_progress_line_of_paused_run_has_no_rate_and_no_remaining_time(tmp_path: Path) -> None:
    events = [make_run_started(), make_step(10), make_epoch(1)]
    training = live_progress(tmp_path / "training", *events)
    assert "images/s" in training and "ETA" in training
    paused = live_progress(tmp_path / "paused", *events, RunPaused(step=10, epoch=1))
    assert "images/s" not in paused and "ETA" not in paused


def test_progress_line_names_phase(tmp_path: Path) -> None:
    validating = PhaseChanged(phase="validating", step=10, epoch=1)
    assert "validating   epoch 1/3   step 10/10" in live_progress(
        tmp_path, make_run_started(), make_step(8), validating
    )


def test_progress_line_of_finished_run_shows_results_without_eta(tmp_path: Path) -> None:
    events = [make_run_started(0.0), *(make_epoch(number, 0.5 + number / 10, 40.0 * number) for number in (1, 2, 3))]
    folder = make_run_folder(tmp_path, "done", *events, RunFinished(time=125.0, state="finished"))
    line = progress_line(polled(folder).row, 100).plain
    assert "finished   3 epochs in 2m05s   best val acc 0.8000 @3" in line
    assert "ETA" not in line and "%" not in line


def test_rank_lines_show_unknown_readings_without_gpu_samples(tmp_path: Path) -> None:
    snapshot = polled(make_run_folder(tmp_path, "unmonitored", make_gpu_run_started(backend="nccl")))
    header, first, *_ = (line.plain.split() for line in rank_lines(snapshot.ranks, None, 80, 1)[1])
    assert (header[:2], first[:2]) == (["rank", "GPU"], ["0", "GPU-0"])
    assert "–" in first


def test_rank_lines_of_ended_run_show_mean_and_maximum(tmp_path: Path) -> None:
    events = [make_gpu_run_started(backend="nccl"), util_at(5.0, 100.0), util_at(10.0, 50.0)]
    snapshot = polled(make_run_folder(tmp_path, "done", *events, RunFinished(time=12.0, state="finished")))
    title, lines = rank_lines(snapshot.ranks, None, 100, 2)
    assert title == "ranks ─ mean and maximum of the whole run"
    assert "75%" in lines[1].plain and "memory GiB" in lines[0].plain and "  30.0  " in lines[1].plain
    assert "⣿" in lines[2].plain, "the load that the GPU had during the run"


def test_rank_lines_show_data_wait_of_each_rank(tmp_path: Path) -> None:
    from engine.runs.records import RankEpochTiming

    work = [RankEpochTiming(0, 10.0, 1.0, 4.0), RankEpochTiming(1, 10.0, 5.0, 4.0)]
    epoch: EpochEvent = replace(make_epoch(1, time=9.0), rank_timings=work)
    snapshot = polled(make_run_folder(tmp_path, "a", make_gpu_run_started(backend="nccl"), epoch))
    lines = rank_lines(snapshot.ranks, None, 100, 1)[1]
    assert "10%" in lines[1].plain and "50%" in lines[2].plain


def test_rank_lines_compare_memory_of_mig_instance_with_its_own(tmp_path: Path, loaded_gpu_host: FakeGpuHost) -> None:
    loaded_gpu_host.set_scene(gpu_line(0, mig=1), "instance 0 uuid=MIG-2 gi=2 total=9728")
    ranks = [RankDevice(0, "h", 1, "MIG-2")]
    run = make_gpu_run_started(backend="nccl", ranks=ranks, devices=["MIG-2"])
    use = GpuEvent(time=time.time(), gpus=[GpuSample("MIG-2", "h", "ok", memory_used=GIB)])
    snapshot = polled(make_run_folder(tmp_path, "a", run, use))
    assert "0:2" in (line := rank_lines(snapshot.ranks, sample_gpus(), 100, 1)[1][1].plain)
    assert "1.0/9.5" in line


def test_rank_lines_begin_title_of_meter_at_meter(tmp_path: Path) -> None:
    events = [make_gpu_run_started(backend="nccl"), util_at(5.0, 100.0), RunFinished(time=12.0, state="finished")]
    snapshot = polled(make_run_folder(tmp_path, "done", *events))
    header, first = (line.plain for line in rank_lines(snapshot.ranks, None, 100, 1)[1][:2])
    assert header.index("util") == first.index(SQUARE)


def test_failure_lines_name_rank_host_and_gpu_once(tmp_path: Path) -> None:
    cause = "CUDA out of memory"
    failed = RankFailed(rank=1, device="GPU-1", cause=cause, code="rank-failed")
    end = RunFinished(state="failed", message=f"rank 1 (GPU-1) failed: {cause}; lower data.batch_size")
    snapshot = polled(make_run_folder(tmp_path, "failed", make_gpu_run_started(backend="nccl"), failed, end))
    lines = [line.plain for line in failure_lines(snapshot, None, 80, Console())]
    assert lines == [" ┃ rank 1 · h · GPU GPU-1  CUDA out of memory", " ┃ lower data.batch_size"]


def test_failure_lines_of_rank_without_cause_keep_message(tmp_path: Path) -> None:
    failed = RankFailed(rank=0, device="cpu", cause="", code="rank-failed")
    end = RunFinished(state="failed", message="rank 0 failed")
    snapshot = polled(make_run_folder(tmp_path, "failed", make_run_started(), failed, end))
    assert " ┃ rank 0 failed" in [line.plain for line in failure_lines(snapshot, None, 80, Console())]


def test_row_of_finished_run_has_no_phase_and_its_last_epoch(tmp_path: Path) -> None:
    started = make_run_started()
    saving = PhaseChanged(phase="saving", step=started.epochs * started.steps_per_epoch, epoch=started.epochs + 1)
    record = polled(
        make_run_folder(tmp_path, "a", started, saving, RunFinished(state="finished", message=""))
    ).row.record
    assert (record.phase, record.current_epoch) == ("", started.epochs)


def test_log_lines_align_figures_of_epochs() -> None:
    from engine.runs.event_lines import event_line

    epochs = [make_epoch(9, 0.5), make_epoch(10, 0.25)]
    lines = [f"2026-01-02 03:04:05  {event_line(epoch)}" for epoch in epochs]
    first, second, other = (line.plain for line in log_lines([*lines, "a line of \x1b a rank"], epochs))
    assert first.startswith("03:04:05  epoch   9   val 0.1222 / 0.5000   train 0.1111 / 0.4000")
    assert second.index("val") == first.index("val") and second.index("train") == first.index("train")
    assert other == "a line of \\x1b a rank"
