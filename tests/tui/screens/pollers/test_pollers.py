"""Pollers: malformed, truncated and replaced files."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from engine.jobs.launch.detached import LaunchedRun
from engine.runs.events import Event, RunFinished
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from engine.runs.log import PendingLines, log_files
from engine.runs.ownership import Ownership
from engine.runs.record_completion import read_journal_record
from engine.runs.run_record import read_run_record, write_summary
from support.gputrain_command import wait_for
from support.messages import has_problem
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_resumed, make_run_started, make_step
from support.runs.factories import (
    append_events,
    append_to_journal,
    default_fields,
    make_run_folder,
    row_of,
    step_lines,
)
from tui.charts.view import ChartView
from tui.screens.pollers.run import MAX_LOG_LINE_LENGTH, RunPoller, read_log_tail
from tui.screens.pollers.run_lists import RunListPoller
from tui.screens.run_progress import progress_line
from tui.screens.tables.ranks import rank_lines
from tui.screens.tables.runs import fit_monitor_list, fit_run_list, monitor_line, run_list_line

MALFORMED = {
    "unknown state": ("events.jsonl", to_line(RunFinished(state="canceled"))),
    "heartbeat that is not a number": ("owner.json", '{"format": 1, "host": "other", "heartbeat": "soon"}'),
    "summary with text values": ("summary.json", '{"best_val_accuracy": "x", "epochs": "many"}'),
    "deeply nested line": ("events.jsonl", "[" * 100_000),
    "GPUs that are not objects": ("events.jsonl", '{"type": "gpus", "time": 1.0, "gpus": [5, "x"]}'),
    "infinity": ("events.jsonl", to_line(make_epoch(1, 0.5)).replace('"seconds":', '"seconds":1e999,"x":')),
    "huge number": ("events.jsonl", to_line(make_step(7)).replace('"step":7', f'"step":{"9" * 400}')),
}


@pytest.mark.parametrize(("name", "text"), MALFORMED.values(), ids=MALFORMED)
def test_run_list_poller_with_malformed_file_still_lists_all_runs(tmp_path: Path, name: str, text: str) -> None:
    make_run_folder(tmp_path, "good", make_run_started(), make_epoch(1, 0.5), RunFinished(state="finished"))
    malformed = make_run_folder(tmp_path, "odd", make_run_started(), make_step(5))
    with (malformed.path / name).open("a") as file:
        file.write(text + "\n")
    list_poller = RunListPoller(tmp_path)
    list_poller.poll()
    assert list_poller.rows is not None and list_poller.problem is None
    for row in list_poller.rows:
        monitor_line(fit_monitor_list([row], 10, 80), row)
        run_list_line(fit_run_list([row], 200, default_fields()), row)
        progress_line(row, 100)
    assert sorted((row.name, row.state) for row in list_poller.rows)[0] == ("good", "finished")
    run_poller = RunPoller(malformed)
    run_poller.poll()
    assert run_poller.latest is not None
    rank_lines(run_poller.latest.ranks, None, 80, 2)
    assert ChartView().x_limits(run_poller.reader.curves)[1] > 0


def test_run_list_poller_reports_thread_error_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poller = RunListPoller(tmp_path, 0.05)
    monkeypatch.setattr(poller, "poll", lambda: 1 / 0)
    poller.start()
    wait_for(lambda: poller.problem is not None, "the error", 5)
    error = poller.problem
    assert error is not None and has_problem([error], "internal-error", "", "ZeroDivisionError")
    monkeypatch.undo()
    wait_for(lambda: poller.problem is None and poller.rows == [], "the next poll", 5)
    poller.close()


def test_run_poller_shows_newest_state_before_long_journal_is_read(tmp_path: Path) -> None:
    is_released = threading.Event()
    folder = make_run_folder(tmp_path, "long", make_run_started(), make_epoch(1, 0.95))
    append_to_journal(folder, step_lines(30_000))
    append_events(folder, RunFinished(state="finished"))
    poller = RunPoller(folder, is_busy=lambda: not is_released.is_set())
    poller.start()
    wait_for(lambda: poller.latest is not None, "the newest state", 5)
    assert poller.latest is not None and not poller.caught_up
    assert (poller.latest.row.state, poller.latest.row.record.values.get("step")) == ("finished", 300_000)
    is_released.set()
    wait_for(lambda: poller.caught_up, "the whole journal", 10)
    record = poller.latest.row.record
    assert (record.values.get("step"), record.values.get("best_val_accuracy")) == (300_000, 0.95)
    poller.close()


def test_run_poller_restarts_when_journal_shrinks(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(), make_epoch(1, 0.5))
    poller = RunPoller(folder)
    poller.poll()
    folder.journal.write_text(to_line(make_run_started()) + "\n")
    poller.poll()
    assert poller.latest is not None and poller.latest.row.record.values.get("epochs") == 0
    assert poller.reader.curves.names == []


@pytest.mark.parametrize("is_missing", [False, True])
def test_run_poller_completes_record_that_its_owner_left_behind(tmp_path: Path, is_missing: bool) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started())
    append_to_journal(folder, to_line(make_epoch(1, 0.5)) + "\n")
    if is_missing:
        folder.summary.unlink()
    RunPoller(folder).poll()
    assert read_run_record(folder) == read_journal_record(folder).record
    assert row_of(folder).record.values.get("val_accuracy") == 0.5


def owned_by(root: Path, name: str, owner: dict[str, object], *events: Event) -> RunFolder:
    folder = make_run_folder(root, name, *events)
    folder.owner.write_text(json.dumps(owner))
    return folder


def test_started_run_is_matched_by_process_whatever_the_clock_says(tmp_path: Path) -> None:
    class Process:
        pid = 4242

    root = tmp_path / "runs"
    output = (tmp_path / "out").open("w+b")
    # It began an hour ahead of what the clock says since.
    launched = LaunchedRun(Process(), output, root, None, time.time() + 3600, start_ticks=77)  # type: ignore[arg-type]
    mine: dict[str, object] = {"format": 1, "pid": 4242, "start_ticks": 77, "host": os.uname().nodename}
    owned_by(root, "reused-pid", mine | {"start_ticks": 76}, make_run_started())
    owned_by(root, "unknown-start", mine | {"start_ticks": None}, make_run_started())
    owned_by(root, "elsewhere", mine | {"host": "other"}, make_run_started())
    owned_by(root, "another", mine | {"pid": 4243}, make_run_started())
    # The journal has an earlier session.
    resumed = owned_by(root, "mine", mine, make_run_started(), RunFinished(state="stopped"))
    resumed.owner.write_text(json.dumps(mine | {"journal_start": resumed.journal.stat().st_size}))
    assert launched.find_folder() is None
    append_events(resumed, make_run_resumed(3, time=time.time()))
    assert launched.find_folder() == resumed
    output.close()


def test_launched_run_output_lines_keeps_file_offset_of_child(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+b") as output:
        launched = LaunchedRun(None, output, tmp_path, None, 0.0)  # type: ignore[arg-type]
        (tmp_path / "out").write_text("first\nsecond\n")
        assert launched.output_lines() == ["first", "second"]
        assert output.tell() == 0


def test_log_tail_reads_bounded_part_of_log_and_lines(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("begin\n")
    os.truncate(log, 1 << 40)
    with log.open("a") as file:
        file.write("\nend\n")
    *_, last = lines = read_log_tail(log)
    assert (len(lines), last) == (1, "end")
    with log.open("a") as file:
        file.write("x" * 20_000)
    assert [len(line) for line in read_log_tail(log)] == [3, MAX_LOG_LINE_LENGTH]


def test_log_tail_of_a_log_with_limit_continues_in_its_earlier_files(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    for path, text in zip(log_files(log), ("first\n", "second\n", "third\n"), strict=True):
        path.write_text(text)
    assert read_log_tail(log) == ("first", "second", "third")


def test_run_poller_shows_lines_that_may_still_change_below_the_log(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "run-1", make_run_started())
    folder.log.write_text("final\n")
    poller, pending = RunPoller(folder), PendingLines(folder.log)
    pending.write(["10%"])
    poller.poll()
    assert poller.log == ("final", "10%")
    pending.write(["20%"])
    poller.poll()
    assert poller.log == ("final", "20%")


def test_run_poller_shows_why_the_owner_cannot_record(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path, "a", make_run_started(time.time()))
    record = read_run_record(folder)
    assert record is not None
    write_summary(folder.summary, replace(record, problem="the disk is full", config={"optim.lr": 0.5}))
    owner = Ownership(folder)
    poller = RunPoller(folder)
    poller.poll()
    assert poller.latest is not None and "the disk is full" in poller.latest.row.message
    assert poller.latest.row.record.config == {"optim.lr": 0.5}
    owner.release()
