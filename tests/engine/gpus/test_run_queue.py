"""What runs ahead in the queue claim, and when they are passed over: they do not take what they wait for, or only their
own user could give it to them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.gpus import run_queue
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.run_queue import CLAIM_TIMEOUT_SECONDS, USER_CLAIM_TIMEOUTS, RunQueue, Turn
from engine.gpus.selection import CudaDevice
from support.gpu.reservations import make_reservation

GPUS = ("GPU-0", "GPU-1")
USER, OTHER_USER, SOMEONE = 1_000_001, 1_000_002, 1_000_003


class Clock:
    """Clocks that the test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(run_queue, "time", fake)
    return fake


def make_waiter(
    name: str = "1-1", uid: int = USER, selection: str = "all", visible: tuple[str, ...] = GPUS, **values: Any
) -> ReservationInfo:
    return make_reservation(name, uid, selection=selection, visible=visible, **values)


def in_use(*users: str, obstacle: Obstacle = Obstacle.IN_USE) -> Unavailable:
    return Unavailable(obstacle, f"in use by {' and '.join(users)}", users=frozenset(users))


def take_turn(queue: RunQueue, *waiters: ReservationInfo, **unavailable: Unavailable) -> Turn:
    """Return the turn of a run of user SOMEONE behind these; `unavailable` are devices by `gpu0` and `gpu1`."""
    devices = {
        name: CudaDevice(index, name, "H100", 0, unavailable=unavailable.get(f"gpu{index}"))
        for index, name in enumerate(GPUS)
    }
    return queue.take_turn(waiters, QueueTerms(), lambda terms: devices)


def claimed(turn: Turn) -> list[str]:
    """Return the devices that the runs ahead claim."""
    return [name for name, device in turn.devices.items() if device.is_queued]


def make_queue(*, wait: bool = True, uid: int = SOMEONE) -> RunQueue:
    return RunQueue(wait=wait, uid=uid)


@pytest.mark.parametrize("wait", [False, True])
def test_run_queue_passes_over_all_runs_of_a_user_after_one_timeout(clock: Clock, wait: bool) -> None:
    queue, waiters = make_queue(wait=wait), [make_waiter(f"1-{number}") for number in range(3)]
    turn = take_turn(queue, *waiters)
    assert (claimed(turn), turn.is_moving, turn.passes) == ([*GPUS], True, [])
    clock.seconds += CLAIM_TIMEOUT_SECONDS + 1
    turn = take_turn(queue, *waiters)
    assert (claimed(turn), turn.is_moving, len(turn.passes)) == ([], False, 3)


@pytest.mark.parametrize(("wait", "timeouts"), [(False, 1), (True, USER_CLAIM_TIMEOUTS)])
def test_run_queue_passes_over_user_whose_runs_replace_each_other(clock: Clock, wait: bool, timeouts: int) -> None:
    queue = make_queue(wait=wait)
    for number in range(timeouts * int(CLAIM_TIMEOUT_SECONDS) + 1):
        assert claimed(take_turn(queue, make_waiter(f"1-{number}"))) == [*GPUS]
        clock.seconds += 1
    assert claimed(take_turn(queue, make_waiter("1-new"))) == []


@pytest.mark.parametrize(("answers_every_s", "is_passed"), [(1, True), (10, False)])
def test_run_queue_waits_for_run_whose_supervisor_is_slow(clock: Clock, answers_every_s: int, is_passed: bool) -> None:
    queue, start = make_queue(), clock.seconds
    for _ in range(int(CLAIM_TIMEOUT_SECONDS) + 3):
        answered = start + (clock.seconds - start) // answers_every_s * answers_every_s
        turn = take_turn(queue, make_waiter(renewed_at=answered))
        clock.seconds += 1
    assert (claimed(turn) == []) == is_passed


def test_run_queue_keeps_claims_of_other_users_for_a_run_that_waits(clock: Clock) -> None:
    queue, waiters = make_queue(), [make_waiter(), make_waiter("2-2", OTHER_USER)]
    take_turn(queue, *waiters)
    clock.seconds += CLAIM_TIMEOUT_SECONDS + 1
    turn = take_turn(queue, *waiters)
    assert (claimed(turn), turn.is_moving) == ([*GPUS], True)


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("selection", ["free:3", "free:100", "0,1,7", "GPU-"])
def test_run_queue_passes_over_run_that_names_unknown_devices(clock: Clock, selection: str, wait: bool) -> None:
    queue, waiter = make_queue(wait=wait), make_waiter(selection=selection, visible=(*GPUS, "GPU-x"))
    take_turn(queue, waiter)
    clock.seconds += CLAIM_TIMEOUT_SECONDS + 1
    turn = take_turn(queue, waiter)
    assert (claimed(turn), turn.is_moving) == ([], False)


OWN = f"uid {USER}"


@pytest.mark.parametrize("selection", ["all", "free:2", "0,1"])
@pytest.mark.parametrize(
    ("held", "uid", "is_claimed"),
    [
        (in_use("b"), SOMEONE, True),
        (in_use(OWN), SOMEONE, False),
        (in_use(OWN, "b"), SOMEONE, False),
        # The user orders their own runs.
        (in_use(OWN), USER, True),
        (Unavailable(Obstacle.LOST, "lost"), USER, False),
        # Its supervisor does not answer.
        (Unavailable(Obstacle.RESERVED, "reserved by run a"), USER, False),
    ],
)
def test_run_claims_only_what_it_can_get_from_others(
    selection: str, held: Unavailable, uid: int, is_claimed: bool
) -> None:
    turn = take_turn(make_queue(uid=uid), make_waiter(selection=selection), gpu0=held)
    assert (claimed(turn) == ["GPU-1"]) == is_claimed
    assert [held.message in why for why in turn.passes] == ([] if is_claimed else [True])


@pytest.mark.parametrize(
    ("selection", "values"),
    [("free:3", {}), ("0,9", {}), ("free:1", {"is_silent": True}), ("all", {"is_silent": True})],
)
def test_run_that_cannot_start_claims_nothing(selection: str, values: dict[str, Any]) -> None:
    turn = take_turn(make_queue(uid=USER), make_waiter(selection=selection, **values))
    assert (claimed(turn), turn.is_moving, len(turn.passes)) == ([], False, 1)


def test_run_claims_devices_before_it_knows_which_it_sees() -> None:
    turn = take_turn(make_queue(), make_waiter(selection="free:1", visible=()))
    assert (claimed(turn), turn.is_moving) == (["GPU-0"], True)
