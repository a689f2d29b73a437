"""The runs that wait for GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.gpus.reservation_reader import ReservationInfo
from tui.text.waiting import WaitingRun, read_waiting_runs, wait_message


def waiter(run: str, selection: str) -> ReservationInfo:
    return ReservationInfo(run, os.geteuid(), f"{run}.lock", 1.0, selection, (), (), ())


@pytest.mark.parametrize(
    ("selection", "wanted"),
    [
        ("free:1", "1 free GPU"),
        ("free:2", "2 free GPUs"),
        ("auto", "free GPUs"),
        ("all", "all GPUs"),
        ("3", "GPU 3"),
        ("2,3", "GPUs 2,3"),
    ],
)
def test_wait_message_names_gpus_and_position(selection: str, wanted: str) -> None:
    run = waiter("second", selection)
    assert wait_message(run, [waiter("first", "auto")]) == f"waits for {wanted}, 1 run ahead"
    assert wait_message(run, []) == f"waits for {wanted}, next in the queue"


def test_read_waiting_runs_without_reservations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    assert read_waiting_runs() == []


def test_waiting_run_line_keeps_end_of_long_name() -> None:
    line = WaitingRun("key", "a-sweep-with-a-long-name-seed-3", "waits for all GPUs").line(12).plain
    assert line.startswith("◌ a-s") and "seed-3  waits for all GPUs" in line
