"""Limits of a user on GPUs and runs at once: who is refused, who waits, and in which order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.base.codec import decode, replace
from engine.config.settings import Limits
from engine.gpus import allocation
from engine.gpus.allocation import GpuAllocation, allocate_devices
from engine.gpus.own_limits import OwnRuns
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.snapshot import SamplerOptions, Snapshot
from support.gpu.reservations import make_reservation
from support.gputrain_command import ROOT
from support.messages import has_problem, raises_problem


class IdleMonitor:
    """A driver with four idle GPUs."""

    def __init__(self, options: SamplerOptions) -> None:
        recorded = decode((ROOT / "tests" / "recordings" / "eight-gpus.jsonl").read_text().splitlines()[0], Snapshot)
        gpus = [
            replace(
                gpu,
                uuid=f"GPU-{gpu.index}",
                processes=replace(gpu.processes, value=()),
                memory_used=replace(gpu.memory_used, value=0),
            )
            for gpu in recorded.gpus[:4]
        ]
        self._snapshot = replace(recorded, gpus=tuple(gpus))

    def read(self, timeout_s: float) -> Snapshot:
        return self._snapshot

    def close(self) -> None:
        pass


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host with four GPUs."""
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", str(tmp_path))
    monkeypatch.setattr(allocation, "WAIT_POLL_SECONDS", 0.0)
    monkeypatch.setattr(allocation, "has_driver_library", lambda: True)
    monkeypatch.setattr(allocation, "DriverMonitor", IdleMonitor)
    yield
    assert read_reservations() == []


def refuse_to_wait(reason: str) -> None:
    raise AssertionError(reason)


def allocate(
    name: str,
    selection: str,
    in_force: Limits,
    *,
    wait: bool = False,
    on_wait: Callable[[str], None] = refuse_to_wait,
    **terms: Any,
) -> GpuAllocation:
    published = QueueTerms(**terms), ""
    return allocate_devices(selection, name, wait=wait, on_wait=on_wait, poll_terms=lambda: published, limits=in_force)


def release(*allocations: GpuAllocation) -> None:
    for each in allocations:
        each.reservation.release()


@pytest.mark.usefixtures("host")
def test_run_beyond_limit_of_gpus_is_refused() -> None:
    first = allocate("first", "free:2", Limits(gpus=3))
    with raises_problem("over-limit", "", "limits.gpus is 3", "2 GPUs used by first"):
        allocate("second", "free:2", Limits(gpus=3))
    second = allocate("second", "free:1", Limits(gpus=3))
    release(first, second)


@pytest.mark.usefixtures("host")
def test_all_gpus_are_more_than_the_limit_although_none_is_used() -> None:
    with raises_problem("over-limit", "device.gpus", "all", "4 GPUs"):
        allocate("run", "all", Limits(gpus=3), wait=True)


@pytest.mark.usefixtures("host")
def test_auto_uses_free_gpus_up_to_the_limit_and_says_so() -> None:
    first = allocate("first", "free:1", Limits(gpus=3))
    auto = allocate("auto", "auto", Limits(gpus=3))
    assert [device.index for device in auto.devices] == [1, 2]
    assert has_problem(auto.warnings, "over-limit", "", "2 of 3 free GPUs", "limits.gpus is 3")
    release(first, auto)


@pytest.mark.usefixtures("host")
def test_runs_at_once_are_limited_on_gpus_and_not_on_the_cpu() -> None:
    runs = [allocate(name, "free:1", Limits(runs=2)) for name in ("first", "second")]
    with raises_problem("over-limit", "", "limits.runs is 2", "running: first, second", "--queue"):
        allocate("third", "free:1", Limits(runs=2))
    release(*runs, allocate("on the CPU", "cpu", Limits(runs=2)))


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("in_force", [Limits(runs=1), Limits(gpus=1)])
def test_queued_run_waits_for_limit_and_claims_no_gpu_meanwhile(in_force: Limits) -> None:
    first, seen = allocate("first", "free:1", in_force), list[str]()

    def on_wait(reason: str) -> None:
        [waiting] = [each for each in read_reservations() if each.is_waiting]
        seen.append(f"{waiting.blocked}: {reason}")
        # Other users are not behind it.
        assert not waiting.is_ready
        release(first)

    second = allocate("second", "free:1", in_force, wait=True, on_wait=on_wait)
    assert len(seen) == 1 and seen[0].startswith("limit: limits.") and "first" in seen[0]
    release(second)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("blocked", "keeps_place"), [("", True), ("held", False)])
def test_run_keeps_its_place_while_a_limit_blocks_it_and_loses_it_while_held(blocked: str, keeps_place: bool) -> None:
    first, arrivals = allocate("first", "free:1", Limits(runs=1)), list[float]()

    def poll_terms() -> tuple[QueueTerms, str]:
        return QueueTerms(blocked=blocked if len(arrivals) == 1 else ""), "held by its user"

    def on_wait(reason: str) -> None:
        arrivals.extend(each.since for each in read_reservations() if each.is_waiting)
        if len(arrivals) == 3:
            release(first)

    second = allocate_devices(
        "free:1", "second", wait=True, on_wait=on_wait, poll_terms=poll_terms, limits=Limits(runs=1)
    )
    arrivals.append(second.reservation.since)
    assert len(arrivals) == 4
    assert (len(set(arrivals)) == 1) == keeps_place
    release(second)


@pytest.mark.usefixtures("host")
def test_run_that_is_held_while_it_selects_gpus_does_not_start() -> None:
    polls, reasons = list[str](), list[str]()

    def poll_terms() -> tuple[QueueTerms, str]:
        # First before the selection, again before the reservation.
        polls.append("held" if len(polls) == 2 else "")
        return QueueTerms(blocked=polls[-1]), polls[-1]

    run = allocate_devices("free:1", "run", wait=True, on_wait=reasons.append, poll_terms=poll_terms)
    assert reasons == ["held"]
    release(run)


def test_runs_that_wait_for_limit_start_in_the_order_of_their_user() -> None:
    uid = os.getuid()
    running = make_reservation("running", uid, gpus=("GPU-0",))
    early, late = (make_reservation(name, uid, since=since, blocked="limit") for name, since in (("a", 1), ("b", 2)))
    urgent = make_reservation("urgent", uid, since=3, blocked="limit", priority=1)
    held = make_reservation("held", uid, since=0, blocked="held")
    strangers = [make_reservation("other", uid + 1, gpus=("GPU-1",))]
    reservations = [running, early, late, held, *strangers]
    assert [may_start(each, reservations, runs=2) for each in (early, late)] == [True, False]
    assert [may_start(each, [*reservations, urgent], runs=2) for each in (early, late, urgent)] == [False, False, True]


def may_start(run: Any, reservations: list[Any], **values: int) -> bool:
    own = OwnRuns(Limits(**values), "free:1")
    own.update(reservations, run.key, wait=True)
    return not own.reached()
