"""The runs in the queue as lines of the monitor, and as the tables of `gputrain queue` and its screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.gpus.reservation import Reservation
from engine.jobs.queue.listing import QueueRow, RowState, describe_wait, list_queue
from engine.report.table import fit, line_width, plain_lines
from support.gpu.reservations import make_reservation
from support.replace import replace
from support.screen.holders import holder_snapshot
from tui.screens.tables.queue import (
    PLAIN_COLUMNS,
    SCREEN_COLUMNS,
    describe_row,
    holders_text,
    mark_kept,
    queue_devices,
    queue_title,
    queued_runs,
    strip_lines,
    wait_message,
)


def make_row(name: str = "a", **values: Any) -> QueueRow:
    defaults = {
        "user": "me", "uid": os.geteuid(), "state": RowState.WAITING, "place": 1, "since": 0.0,
        "reason": "GPU 0: in use", "gpus": "free:2",
    }  # fmt: skip
    return QueueRow(name=name, **defaults | values)


def test_describe_wait_names_gpus_and_position() -> None:
    run = make_reservation("a", os.geteuid(), selection="free:1")
    assert describe_wait(run, [run]) == "waits for --gpus free:1, 1 run ahead"
    assert describe_wait(run, []) == "waits for --gpus free:1, next in the queue"


def test_wait_message_names_another_user_and_escapes_control_characters() -> None:
    assert wait_message(make_row()) == "GPU 0: in use"
    foreign = make_row(uid=os.geteuid() + 1, user="ada", reason="\x1b[2J")
    assert wait_message(foreign) == "\\x1b[2J  (ada)"


def test_title_counts_runs_that_wait_for_devices() -> None:
    rows = [make_row("a"), make_row("b", gpus="cpu"), make_row("c", gpus="cpu", state=RowState.HELD)]
    assert queue_title(rows) == "2 waiting, 3 yours"


def test_reason_names_the_keys_of_the_screen() -> None:
    row = make_row(reason="held; `gputrain queue release a` lets it start")
    assert describe_row(row).startswith("a (me): held; h lets it start")
    row = make_row(reason="after run b, which was interrupted; `gputrain queue resume b` starts it")
    assert describe_row(row).startswith("a (me): after run b, which was interrupted; u starts it")


def test_list_queue_lists_published_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    assert list_queue() == []
    entry = Reservation()
    entry.enqueue("free:2", ["GPU-0"], "sweep")
    [waiting] = list_queue()
    entry.release()
    assert (waiting.name, wait_message(waiting)) == ("sweep", "waits for --gpus free:2, next in the queue")


def test_queue_table_marks_runs_without_a_place() -> None:
    held = make_row("b", place=None, state=RowState.HELD, priority=-3, share=4)
    lines = plain_lines(PLAIN_COLUMNS, [make_row(), held])
    assert [line.split()[:6] for line in lines[1:]] == [
        ["1", "a", "me", "waiting", "free:2", "0"],
        ["–", "b", "me", "held", "free:2", "/4"],
    ]


@pytest.mark.parametrize("width", [20, 57, 80, 120, 250])
def test_queue_table_fits_width_and_keeps_name_and_what_blocks(width: int) -> None:
    row = make_row("花朵" * 30, reason="GPU 0: reserved by run b\x1b[2J" * 5, user="ada" * 9, place=None)
    [run] = queued_runs([row], (), {})
    table = fit(SCREEN_COLUMNS, [run], width)
    assert line_width(table.line(run)) <= width
    assert width < 57 or {"name", "blocked_by", "starts_in"} <= {column.key for column in table.columns}


def test_queued_runs_say_who_holds_gpus_and_when_they_are_expected_to_start() -> None:
    # GPUs 2 and 3 are free.
    gpus = [replace(gpu, runs=("mine",)) if gpu.index == 1 else gpu for gpu in holder_snapshot().gpus[:4]]
    devices = queue_devices(gpus, None, {"mine": 600.0})
    rows = [make_row("a", gpus="free:2"), make_row("b", gpus="1,3", share=4), make_row("c", gpus="0")]
    first, second, third = queued_runs(rows, devices, {})
    assert (first.need, first.has, first.blocked_by, first.starts_in) == (2, 2, "", 0.0)
    # The first run gets GPU 3, and nobody knows for how long.
    assert (second.need, second.has, second.blocked_by, second.starts_in) == (2, 0, "3 a · 1 mine", None)
    assert (third.need, third.has, third.blocked_by, third.starts_in) == (1, 0, "0 ana, bob, eva idle 42 min", None)
    [waiting] = queued_runs([make_row(gpus="free:3")], devices, {})
    assert (waiting.has, waiting.starts_in) == (2, 600.0)
    assert holders_text(devices) == "0 ana, bob, eva idle 42 min · 1 mine · 2,3 free"


def test_free_gpus_that_a_waiting_run_keeps_from_the_others_are_marked() -> None:
    # GPUs 2 and 3 are free.
    devices = queue_devices(holder_snapshot().gpus[1:4], None, {})
    runs = queued_runs([make_row("a\x1b", gpus="1,2"), make_row("b", gpus="2")], devices, {})
    assert holders_text(mark_kept(devices, runs)) == "1 fashion-17 · 2 kept for a\\x1b · 3 free"


def test_queued_runs_name_the_run_that_holds_the_cpu_and_the_run_before() -> None:
    devices = queue_devices((), ["holder"], {"holder": 60.0})
    first, second = queued_runs([make_row("a", gpus="cpu"), make_row("b", gpus="cpu")], devices, {})
    assert (first.need, first.has, first.blocked_by, first.starts_in) == (1, 0, "CPU holder", 60.0)
    assert (second.blocked_by, second.starts_in) == ("CPU holder", None)
    [free] = queued_runs([make_row("a", gpus="cpu")], queue_devices((), [], {}), {})
    assert (free.has, free.starts_in) == (1, 0.0)


@pytest.mark.parametrize(
    ("state", "values", "blocked_by"),
    [
        (RowState.DEPENDENT, {"after": ("ended", "going")}, "going"),
        (RowState.DEPENDENT, {}, "other runs"),
        (RowState.HELD, {}, "held"),
        (RowState.LIMITED, {}, "your limit"),
        (RowState.INTERRUPTED, {}, "interrupted"),
    ],
)
def test_queued_run_that_waits_for_no_gpu_says_what_for_in_a_word(
    state: RowState, values: dict[str, Any], blocked_by: str
) -> None:
    [run] = queued_runs([make_row(state=state, reason="a sentence; with advice", **values)], (), {"going": None})
    # How many GPUs it needs is known.
    assert (run.blocked_by, run.need, run.has, run.starts_in) == (blocked_by, 2, None, None)


@pytest.mark.parametrize("width", [20, 60, 250])
@pytest.mark.parametrize("is_wide", [True, False], ids=["beside", "below"])
def test_strip_of_gpus_fits_width_and_says_who_holds_each_and_until_when(width: int, *, is_wide: bool) -> None:
    devices = queue_devices(holder_snapshot().gpus, ["花朵" * 30], {"fashion-17": 600.0})
    lines = strip_lines(devices, width, is_wide=is_wide)
    assert max(line.cell_len for line in lines) <= width
    if width > 60:
        shown = " ".join(line.plain for line in lines)
        assert all(word in shown for word in ("idle 42 min", "fashion-17", "10m00s", "2,3", "free", "bob"))
