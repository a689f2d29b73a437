"""Progress, results and ranks of a run on its screen."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from engine.runs.events import (
    EpochEvent,
    Event,
    GpuEvent,
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
from tui.screens.pollers.run import RunPoller, RunSnapshot
from tui.screens.run_progress import failure_lines, progress_line
from tui.screens.tables.ranks import rank_lines

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


def test_progress_line_of_paused_run_has_no_rate_and_no_remaining_time(tmp_path: Path) -> None:
    events = [make_run_started(), make_step(10), make_epoch(1)]
    training = live_progress(tmp_path / "training", *events)
    assert "images/s" in training and "ETA" in training
    paused = live_progress(tmp_path / "paused", *events, RunPaused(step=10, epoch=1))
    assert "images/s" not in paused and "ETA" not in paused


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


def test_failure_lines_name_rank_host_and_gpu_once(tmp_path: Path) -> None:
    cause = "CUDA out of memory"
    failed = RankFailed(rank=1, device="GPU-1", cause=cause, code="rank-failed")
    end = RunFinished(state="failed", message=f"rank 1 (GPU-1) failed: {cause}; lower data.batch_size")
    snapshot = polled(make_run_folder(tmp_path, "failed", make_gpu_run_started(backend="nccl"), failed, end))
    lines = [line.plain for line in failure_lines(snapshot, None, 80, Console())]
    assert lines == [" ┃ rank 1 · h · GPU GPU-1  CUDA out of memory", " ┃ lower data.batch_size"]
