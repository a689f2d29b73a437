"""A run that does not start before its begin time (`queue.begin`), and how the time is changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.gpus import allocation
from engine.gpus.queue_terms import MAX_TIME
from engine.launch.request import RunRequest
from engine.queue import place as place_module
from engine.queue.edit import find_own_row, set_begin
from engine.queue.listing import RowState, list_queue
from engine.queue.state import read_queue_state
from engine.runs.control import send_request
from engine.runs.folder import RunFolder
from engine.utils.units import format_date
from support.messages import raises_problem
from support.runs.run_owner import Owner

NOW = 1_795_000_000.0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path / "reservations"))
    (tmp_path / "reservations").mkdir()
    monkeypatch.setattr(allocation, "WAIT_POLL_SECONDS", 0.01)
    return tmp_path / "runs"


def queued(runs: Path, begin: str) -> Owner:
    settings = ["run.name=late", "run.resume=true", "device.gpus=cpu", f"queue.begin={begin}"]
    return Owner(RunRequest(resolve_config("digits", settings).config, runs, "late"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The Unix time that the queue reads, in a list."""
    now = [NOW]
    monkeypatch.setattr(place_module.time, "time", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_run_is_blocked_until_its_begin_time(runs: Path, clock: list[float]) -> None:
    run = queued(runs, "now+2h")
    place = run.queue().place
    terms, reason = place.poll_terms()
    assert (terms.blocked, terms.begin, reason) == ("begin", NOW + 7200, f"begins at {format_date(NOW + 7200)}")
    clock[0] = NOW + 7201
    terms, reason = place.poll_terms()
    assert (terms.blocked, reason) == ("", "")
    run.release()


def test_begin_time_survives_restart_of_owner(runs: Path, clock: list[float]) -> None:
    first = queued(runs, "now+2h")
    first.queue()
    # As after a kill: nothing is recorded.
    first.release()
    clock[0] = NOW + 3600
    second = queued(runs, "now+2h")
    state = second.queue().place.state
    assert state.begin == NOW + 7200
    second.release()


def test_request_changes_begin_time(runs: Path, clock: list[float]) -> None:
    run = queued(runs, "now+2h")
    place = run.queue().place
    for begin, is_valid in ((NOW + 60, True), (2 * MAX_TIME, False), (-1.0, False), (0.0, True)):
        send_request(place.folder.control, "begin", begin=begin)
        before = place.state.begin
        place.poll_terms()
        state = read_queue_state(place.folder)
        assert state is not None and state.begin == (begin if is_valid else before)
    assert place.poll_terms()[0].blocked == ""
    run.release()


def test_interrupted_run_keeps_begin_time_in_list_and_refuses_to_change_it(runs: Path) -> None:
    run = queued(runs, "now+2h")
    begin = run.queue().place.state.begin
    run.release()
    row = find_own_row("late", runs, list_queue(runs))
    assert (row.state, row.begin) == (RowState.INTERRUPTED, begin)
    with raises_problem("wrong-state", "late", "gputrain queue resume late"):
        set_begin(row, 0.0)
    assert RunFolder(runs / "late").path.is_dir()
