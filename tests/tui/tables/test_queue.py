"""The runs in the queue as lines of the monitor, and as the tables of `gputrain queue` and its screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.gpus.reservation import Reservation
from engine.queue.listing import QueueRow, RowState, describe_wait, list_queue
from engine.show.table import line_width, plain_lines
from support.gpu.reservations import make_reservation
from support.replace import replace
from support.screen.holders import holder_feed
from tui.tables.queue import (
    PLAIN_COLUMNS,
    holders_text,
    queue_status_line,
    queue_table,
    queued_runs,
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


def test_status_line_counts_runs_that_wait_for_devices() -> None:
    rows = [make_row("a"), make_row("b", gpus="cpu"), make_row("c", gpus="cpu", state=RowState.HELD)]
    assert queue_status_line(rows).plain == " 2 runs waiting, 3 of yours listed"


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
    table = queue_table([run], width)
    assert line_width(table.line(run)) <= width
    assert width < 57 or {"name", "blocked_by"} <= {column.key for column in table.columns}


def test_queued_runs_say_who_holds_gpus_and_when_they_are_expected_to_start() -> None:
    # GPUs 2 and 3 are free.
    gpus = [replace(gpu, runs=("mine",)) if gpu.index == 1 else gpu for gpu in holder_feed().snapshot.gpus[:4]]
    rows = [make_row("a", gpus="free:2"), make_row("b", gpus="1,3"), make_row("c", gpus="0")]
    first, second, third = queued_runs(rows, gpus, {"mine": 600.0})
    assert (first.need, first.has, first.starts_in) == (2, 2, 0.0)
    # The first run gets GPU 3, and nobody knows for how long.
    assert (second.need, second.has, second.blocked_by, second.starts_in) == (2, 0, "1 mine · 3 a", None)
    assert (third.need, third.has, third.blocked_by, third.starts_in) == (1, 0, "0 ana, bob, eva idle 42 min", None)
    # How many GPUs it needs is known of a run that cannot start yet, too.
    assert queued_runs([make_row(state=RowState.HELD, gpus="free:2")], gpus, {})[0].need == 2
    [waiting] = queued_runs([make_row(gpus="free:3")], gpus, {"mine": 600.0})
    assert (waiting.has, waiting.starts_in) == (2, 600.0)
    assert holders_text(gpus) == "0 ana, bob, eva idle 42 min · 1 mine · 2,3 free"
