"""The queue of runs that wait for GPUs: a run ahead that could reserve its devices but does not is passed over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.gpus import allocation, run_queue
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.queue_terms import Backfill, QueueTerms
from engine.gpus.reservation_reader import ReservationInfo
from engine.gpus.run_queue import CLAIM_TIMEOUT_SECONDS, RunQueue
from engine.gpus.selection import CudaDevice
from support.gpu.reservations import make_reservation

GPUS = ("GPU-0", "GPU-1")
USER, OTHER_USER = 1001, 1002


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(run_queue, "time", SimpleNamespace(monotonic=fake.monotonic))
    return fake


def make_waiter(
    name: str = "1-1", uid: int = USER, selection: str = "all", visible: tuple[str, ...] = GPUS
) -> ReservationInfo:
    return make_reservation(name, uid, selection=selection, visible=visible)


def claimed(queue: RunQueue, *waiters: ReservationInfo, in_use: str | None = None) -> list[str]:
    """Return the devices that the runs ahead claim."""
    by_id = {
        name: CudaDevice(
            index,
            name,
            "H100",
            0,
            unavailable=Unavailable(Obstacle.IN_USE, "in use by process 1 (user a)") if name == in_use else None,
        )
        for index, name in enumerate(GPUS)
    }
    queue.mark_claimed(waiters, by_id)
    return [name for name, device in by_id.items() if device.is_queued]


@pytest.mark.parametrize("wait", [False, True])
def test_run_queue_passes_over_all_runs_of_a_user_after_one_timeout(clock: Clock, wait: bool) -> None:
    queue, waiters = RunQueue(wait=wait), [make_waiter(f"1-{number}") for number in range(3)]
    assert (claimed(queue, *waiters), queue.is_moving) == ([*GPUS], True)
    clock.seconds += CLAIM_TIMEOUT_SECONDS + 1
    assert (claimed(queue, *waiters), queue.is_moving) == ([], False)


@pytest.mark.parametrize("wait", [False, True])
def test_run_queue_passes_over_user_whose_runs_replace_each_other(clock: Clock, wait: bool) -> None:
    queue = RunQueue(wait=wait)
    for number in range(int(CLAIM_TIMEOUT_SECONDS) + 1):
        assert claimed(queue, make_waiter(f"1-{number}")) == [*GPUS]
        clock.seconds += 1
    assert claimed(queue, make_waiter("1-new")) == []


def test_run_queue_keeps_claims_of_other_users_for_a_run_that_waits(clock: Clock) -> None:
    queue, waiters = RunQueue(wait=True), [make_waiter(), make_waiter("2-2", OTHER_USER)]
    claimed(queue, *waiters)
    clock.seconds += CLAIM_TIMEOUT_SECONDS + 1
    assert (claimed(queue, *waiters), queue.is_moving) == ([*GPUS], True)


def test_run_queue_delays_a_run_that_does_not_wait_for_one_timeout_only(clock: Clock) -> None:
    queue = RunQueue(wait=False)
    assert claimed(queue, make_waiter()) == [*GPUS]
    clock.seconds += CLAIM_TIMEOUT_SECONDS - 1
    assert claimed(queue) == []
    clock.seconds += 2
    assert (claimed(queue, make_waiter("2-2", OTHER_USER)), queue.is_moving) == ([], False)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("selection", ["free:3", "free:100", "0,1,7", "GPU-"])
def test_run_queue_passes_over_run_that_names_unknown_devices(clock: Clock, selection: str, wait: bool) -> None:
    queue, waiter = RunQueue(wait=wait), make_waiter(selection=selection, visible=(*GPUS, "GPU-x"))
    claimed(queue, waiter)
    clock.seconds += CLAIM_TIMEOUT_SECONDS + 1
    assert (claimed(queue, waiter), queue.is_moving) == ([], False)


@pytest.mark.parametrize("wait", [False, True])
def test_run_queue_keeps_claim_while_another_process_uses_a_device(clock: Clock, wait: bool) -> None:
    queue = RunQueue(wait=wait)
    for _ in range(3):
        assert (claimed(queue, make_waiter(), in_use="GPU-0"), queue.is_moving) == (["GPU-1"], False)
        clock.seconds += CLAIM_TIMEOUT_SECONDS + 1


def test_end_of_backfill_follows_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else runs behind could use the devices for an hour longer, or not at all."""
    now = SimpleNamespace(passed_s=0.0, step_s=0.0)
    times = SimpleNamespace(time=lambda: 1000.0 + now.passed_s + now.step_s, monotonic=lambda: 50.0 + now.passed_s)
    monkeypatch.setattr(allocation, "time", times)
    terms, backfill = (QueueTerms(), ""), Backfill(allowed_s=300.0)
    waiter, ends = allocation._Allocator("free:2", "a", True, None, lambda: terms, backfill, lambda _: None), []
    for now.passed_s, now.step_s in ((0.0, 0.0), (100.0, 0.0), (120.0, 3600.0), (150.0, -3600.0)):
        waiter._start_backfill([CudaDevice(0, GPUS[0], "H100", 0)])
        ends.append(waiter.reservation.backfill_until)
    assert ends == [1300.0, 1300.0, 4900.0, -2300.0]
