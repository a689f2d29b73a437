"""The ranks of a run on its screen."""

from __future__ import annotations

from pathlib import Path

from factories import make_gpu_run_started, make_run_folder
from tui.pollers import RunPoller
from tui.text.run_progress import device_lines


def test_device_lines_show_unknown_readings_without_gpu_samples(tmp_path: Path) -> None:
    run_poller = RunPoller(make_run_folder(tmp_path, "unmonitored", make_gpu_run_started(backend="nccl")))
    run_poller.poll()
    assert run_poller.latest is not None
    title, lines = device_lines(run_poller.latest, 80)
    assert title == "GPUs of this run"
    assert [line.plain for line in lines][:2] == ["rank 0  GPU-0  readings unknown", "rank 1  GPU-1  readings unknown"]
