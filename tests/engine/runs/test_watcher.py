"""RunWatcher: the latest state of a run without reading its whole journal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.runs import journal, watcher
from engine.runs.events import Event, GpuEvent, RunContinued, RunFinished, RunPaused, RunResumed
from engine.runs.folder import RunFolder
from engine.runs.journal import from_line, to_line
from engine.runs.records import GpuSample
from engine.runs.watcher import MAX_FULL_READ_BYTES, TAIL_BYTES, RunWatcher
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started
from support.runs.factories import append_to_journal, make_run_folder, step_lines


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
    assert watch.bytes_read < 4 * TAIL_BYTES


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
    append_to_journal(folder, to_line(resumed).replace('"epochs":3', '"epochs":"3"') + "\n")
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
    append_to_journal(folder, (to_line(GpuEvent(gpus=[GpuSample("GPU-1", util=0)] * 8)) + "\n") * 3000)
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


def test_run_watcher_reports_sparse_journal_without_reading_it(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "sparse", make_run_started())
    os.truncate(folder.journal, 1 << 40)
    watch = RunWatcher(folder)
    assert watch.poll().latest_step is None
    assert watch.problem == "events.jsonl is damaged: it has a line of more than 16 MiB"
    append_to_journal(folder, "\n" + step_lines(2))
    assert watch.poll().steps_done == 20


def test_run_watcher_bounds_search_behind_lines_that_begin_like_a_start(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "hostile", make_run_started())
    append_to_journal(folder, ('{"type":"run_started", ' + "x" * (1 << 16) + "\n") * 200)
    append_to_journal(folder, '{"type": "mood"}\n' * 20_000)
    parsed_bytes = 0

    def count(line: str) -> Event | None:
        nonlocal parsed_bytes
        parsed_bytes += len(line)
        return from_line(line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watcher, "from_line", count)
        patch.setattr(journal, "from_line", count)
        # The session starts at the beginning, too far from the end for the search.
        assert RunWatcher(folder).poll().started is not None
    assert parsed_bytes < 3 * journal.MAX_PARSED_BYTES


def test_run_watcher_finds_start_at_beginning_of_very_long_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_SCAN_BYTES", journal.SCAN_BLOCK_BYTES)
    folder = long_run(tmp_path)
    history = RunWatcher(folder).poll()
    assert history.started is not None
    assert history.steps_done == 120_000


def test_run_watcher_reads_last_line_that_is_longer_than_tail(tmp_path: Path) -> None:
    folder = long_run(tmp_path)
    line = to_line(replace(make_run_resumed(120_000, 1.0), devices=["cpu"] * 100_000)) + "\n"
    assert len(line) > TAIL_BYTES
    append_to_journal(folder, line[:-9])
    watch = RunWatcher(folder)
    assert watch.poll().steps_done == 120_000
    append_to_journal(folder, line[-9:])
    assert isinstance(watch.poll().started, RunResumed)
    assert isinstance(RunWatcher(folder).poll().started, RunResumed)
