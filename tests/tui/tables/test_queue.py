"""The runs in the queue as lines of the monitor, and as the tables of `gputrain queue` and its screen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from engine.gpus.reservation import Reservation
from engine.queue.listing import QueueRow, RowState, describe_wait, list_queue
from engine.show.table import fit, line_width, plain_lines
from support.gpu.reservations import make_reservation
from tui.tables.queue import PLAIN_COLUMNS, SCREEN_COLUMNS, queue_title, wait_message


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
    assert queue_title(rows) == "2 waiting for GPUs, 3 of yours listed"


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
def test_queue_table_fits_width_and_keeps_name_and_reason(width: int) -> None:
    row = make_row("花朵" * 30, reason="GPU 0: reserved by run b\x1b[2J" * 5, user="ada" * 9, place=None)
    table = fit(SCREEN_COLUMNS, [row], width)
    assert line_width(table.line(row)) <= width
    assert width < 57 or {"name", "reason"} <= {column.key for column in table.columns}
