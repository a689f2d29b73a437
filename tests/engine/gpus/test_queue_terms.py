"""The order of the queue: users order their own runs over their own arrivals."""

from __future__ import annotations

from typing import Any

from engine.gpus.queue_terms import queue_order
from engine.gpus.reservation_entry import ReservationInfo
from support.gpu.reservations import make_reservation

MINE, THEIRS = 1001, 1002


def make_entry(run: str, since: float, uid: int = MINE, **terms: Any) -> ReservationInfo:
    return make_reservation(run, uid, since=since, selection="free:1", **terms)


def names(*entries: ReservationInfo) -> list[str]:
    return [entry.run for entry in queue_order(entries)]


def test_queue_order_is_that_of_arrival() -> None:
    assert names(make_entry("c", 3), make_entry("a", 1), make_entry("b", 2, THEIRS)) == ["a", "b", "c"]


def test_queue_order_lets_priority_permute_only_the_slots_of_its_user() -> None:
    entries = [make_entry("a", 1), make_entry("b", 2, THEIRS), make_entry("c", 3, priority=1000), make_entry("d", 4)]
    assert names(*entries) == ["c", "b", "a", "d"]


def test_queue_order_ignores_priorities_of_another_user() -> None:
    entries = [make_entry("a", 1), make_entry("b", 2, THEIRS, priority=1 << 20, position=-1e11)]
    assert names(*entries) == ["a", "b"]


def test_queue_order_follows_position_within_equal_priority() -> None:
    entries = [make_entry("a", 1), make_entry("b", 2, position=0.5), make_entry("c", 3, position=0.75)]
    assert names(*entries) == ["b", "c", "a"]


def test_queue_order_leaves_slots_of_blocked_and_running_runs_to_nobody() -> None:
    entries = [
        make_entry("held", 1, blocked="held"),
        make_entry("running", 2, gpus=("GPU-0",)),
        make_entry("b", 3, THEIRS),
        make_entry("a", 4, priority=5),
    ]
    assert names(*entries) == ["b", "a"]
