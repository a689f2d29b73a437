"""RunWatcher: the latest state of a run without reading its whole journal."""

from __future__ import annotations

from pathlib import Path

from engine.runs.events import GpuEvent, RunContinued, RunFinished, RunPaused, RunResumed
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from engine.runs.records import GpuSample
from engine.runs.watcher import INITIAL_TAIL_BYTES, MAX_FULL_READ_BYTES, RunWatcher
from factories import (
    append_to_journal,
    make_epoch,
    make_run_folder,
    make_run_resumed,
    make_run_started,
    step_lines,
)


def long_run(root: Path) -> RunFolder:
    folder = make_run_folder(root, "long", make_run_started())
    append_to_journal(folder, step_lines(12_000))
    assert folder.journal.stat().st_size > MAX_FULL_READ_BYTES
    return folder


def test_run_watcher_reads_only_ends_of_long_journal(tmp_path: Path) -> None:
    watch = RunWatcher(long_run(tmp_path))
    history = watch.poll()
    assert history.started is not None
    assert history.steps_done == 120_000
    assert watch.bytes_read < 4 * INITIAL_TAIL_BYTES


def test_run_watcher_finds_start_of_long_journal_behind_gpu_samples(tmp_path: Path) -> None:
    samples = [GpuEvent(gpus=[GpuSample(f"GPU-{index}", "h") for index in range(8)])] * 100
    folder = make_run_folder(tmp_path, "long", *samples, make_run_started())
    append_to_journal(folder, step_lines(12_000))
    started = RunWatcher(folder).poll().started
    assert started is not None
    assert started.world_size == 2


def test_run_watcher_finds_latest_intact_start_of_long_journal(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    append_to_journal(folder, to_line(make_run_resumed(120_000, 1.0)) + "\n" + step_lines(12_000, 12_001))
    resumed = RunWatcher(folder).poll().started
    assert isinstance(resumed, RunResumed)
    append_to_journal(folder, to_line(resumed).replace('"epochs": 3', '"epochs": "3"') + "\n")
    append_to_journal(folder, step_lines(12_000, 24_001))
    history = RunWatcher(folder).poll()
    assert (history.started, history.steps_done) == (resumed, 360_000)


def test_run_watcher_reads_only_new_lines(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    watch = RunWatcher(folder)
    watch.poll()
    before = watch.bytes_read
    new_lines = to_line(make_epoch(1, 0.9)) + "\n" + step_lines(1, 12_001)
    append_to_journal(folder, new_lines[:-5])
    assert watch.poll().epochs[-1].val_accuracy == 0.9
    append_to_journal(folder, new_lines[-5:])
    assert watch.poll().steps_done == 120_010
    assert watch.bytes_read - before == len(new_lines)


def test_run_watcher_reports_long_pause(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    append_to_journal(folder, to_line(RunPaused(step=120_000, epoch=1)) + "\n")
    append_to_journal(folder, (to_line(GpuEvent(gpus=[GpuSample("GPU-1", busy=0)] * 8)) + "\n") * 3000)
    assert RunWatcher(folder).poll().paused
    append_to_journal(folder, to_line(RunContinued(step=120_000, epoch=1)) + "\n")
    assert not RunWatcher(folder).poll().paused


def test_run_watcher_reads_short_journal_whole(tmp_path: Path) -> None:
    watch = RunWatcher(
        make_run_folder(
            tmp_path, "short", make_run_started(), make_epoch(1, 0.9), make_epoch(2, 0.8), RunFinished(state="finished")
        )
    )
    history = watch.poll()
    assert history.best is not None
    assert (len(history.epochs), history.best.epoch) == (2, 1)


def test_run_watcher_reads_incomplete_last_line_once_complete(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    line = to_line(RunFinished(state="finished")) + "\n"
    append_to_journal(folder, line[:7])
    watch = RunWatcher(folder)
    assert watch.poll().finished is None
    append_to_journal(folder, line[7:])
    assert watch.poll().finished is not None


def test_run_watcher_restarts_when_journal_shrinks_or_vanishes(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_epoch(1, 0.9))
    watch = RunWatcher(folder)
    assert watch.poll().epochs
    folder.journal.write_text(to_line(make_run_started()) + "\n")
    assert not watch.poll().epochs
    folder.journal.unlink()
    assert watch.poll().started is None
