"""A model of the queue: whatever the users of a host do, no GPU has two owners, nobody is passed without a reason that
is shown, nobody waits for ever beside enough free GPUs, and the run that is shown as first starts first.

The runs are those of `allocation`, `run_queue` and `selection`; a dictionary stands for the reservations in /tmp.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gpus import allocation, run_queue
from engine.gpus.allocation import GpuAllocation
from engine.gpus.own_limits import OwnRuns
from engine.gpus.queue_terms import QueueTerms, queue_order
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.reservation_reader import SILENT_SECONDS
from engine.gpus.run_queue import CLAIM_TIMEOUT_SECONDS, USER_CLAIM_TIMEOUTS
from engine.gpus.selection import CudaDevice, NotFreeError, mark_reserved, select
from support.gpu.reservations import make_reservation

GPUS = [CudaDevice(index, f"GPU-{index}", "H100", 0) for index in range(4)]
NAMES = tuple(gpu.uuid for gpu in GPUS)
# After this time, nobody keeps a GPU free any more for runs that do not take it.
SETTLE_SECONDS = int(SILENT_SECONDS + (USER_CLAIM_TIMEOUTS + 1) * CLAIM_TIMEOUT_SECONDS)
STEP_SECONDS = 5


@dataclass
class Host:
    """Stands for the clock, the driver and the folder of reservations."""

    now: float = 1000.0
    lost: set[int] = field(default_factory=set)
    runs: list[Run] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    monotonic = time

    def read(self, report: object = None) -> list[ReservationInfo]:
        return [run.info() for run in self.runs if run.is_listed]

    def devices(self, others: Sequence[ReservationInfo], terms: QueueTerms) -> list[CudaDevice]:
        return mark_reserved([gpu for gpu in GPUS if gpu.index not in self.lost], others, terms)


class Run:
    """A run with the allocator of the product, and its reservation, which this object stands for."""

    def __init__(self, host: Host, uid: int, selection: str, share: int, priority: int, *, is_earlier: bool) -> None:
        self.host, self.uid, self.selection, self.is_earlier = host, uid, selection, is_earlier
        self.name = f"run-{len(host.runs)}"
        self.terms = QueueTerms(share=share, priority=priority, position=host.now)
        self.held = self.is_suspended = self.is_listed = False
        self.key, self.lock = (uid, f"{self.name}.lock"), None
        self.since = self.renewed_at = host.now
        self.gpus: tuple[str, ...] = ()
        self.reason = ""
        self.allocator = allocation._Allocator(selection, self.name, True, None, self.poll_terms, print, OwnRuns())
        self.allocator.reservation, self.allocator._reservations = self, host  # type: ignore[assignment]
        self.allocator._queue.uid = uid
        self.allocator.enqueue(NAMES)

    def poll_terms(self) -> tuple[QueueTerms, str]:
        terms = replace_terms(self.terms, blocked="held" if self.held else "")
        return terms, "held" if self.held else ""

    def set_terms(self, terms: QueueTerms, reason: str | None = None) -> None:
        self.published, self.reason = terms, self.reason if reason is None else reason

    def reserve(self, gpus: Sequence[str], *_: object) -> None:
        self.gpus, self.is_listed = tuple(gpus), True
        self.published = getattr(self, "published", self.terms)

    def enqueue(self, *_: object) -> None:
        self.reserve(())

    def rejoin(self, *_: object) -> None:
        self.since = self.host.now

    def renew(self) -> None:
        self.renewed_at = self.host.now

    def info(self) -> ReservationInfo:
        known: dict[str, Any] = {"priority": self.published.priority, "blocked": self.published.blocked}
        if not self.is_earlier:
            known |= {"renewed_at": self.renewed_at, "is_silent": self.host.now - self.renewed_at > SILENT_SECONDS}
        known |= {"selection": self.selection, "visible": NAMES, "gpus": self.gpus, "share": self.terms.share}
        return replace_terms(make_reservation(self.name, self.uid, since=self.since, reason=self.reason), **known)

    @property
    def waits(self) -> bool:
        return self.is_listed and not self.gpus and not self.is_suspended

    def could_start(self, *, ignores_holders: bool = False) -> bool:
        """Whether enough GPUs are free for it, whoever else waits for them."""
        others = [] if ignores_holders else [each for each in self.host.read() if each.key != self.key]
        try:
            devices = [
                replace(gpu, unavailable=allocation.NOT_REPORTED) if gpu.index in self.host.lost else gpu
                for gpu in mark_reserved(GPUS, others, self.terms)
            ]
            return bool(select(self.selection, devices, only_free=True, shares=self.terms.shares))
        except NotFreeError:
            return False

    def poll(self) -> None:
        """Do what a supervisor does once per second, and check what it decides."""
        queue = [each.key for each in queue_order(self.host.read())]
        is_first, could_start = queue[:1] == [self.key], self.could_start()
        could = [run for run in self.host.runs if run.waits and run.key in queue and run.could_start()]
        found = GpuAllocation()
        reason = self.allocator._attempt(found, self.host.devices, GPUS)
        if reason is not None:
            self.reason = reason
            assert self.gpus == ()
            assert not (is_first and could_start and not self.held), "the first in the queue does not start"
            return
        assert could_start and not self.held
        ahead = [run for run in could if self.key in queue and queue.index(run.key) < queue.index(self.key)]
        passed = [run for run in ahead if not run.could_start()]
        shown = " ".join(str(warning) for warning in found.warnings)
        assert all(f"{run.name} (" in shown for run in passed), "passed without a reason"

    def end(self) -> None:
        self.is_listed, self.gpus = False, ()


def replace_terms(record: Any, **values: Any) -> Any:
    return allocation.codec.replace(record, **values)


def check_no_gpu_twice(host: Host) -> None:
    for name in NAMES:
        holders = [run for run in host.runs if name in run.gpus]
        assert len(holders) <= min((run.terms.share for run in holders), default=1), f"{name} twice"


def settle(host: Host) -> None:
    for _ in range(0, SETTLE_SECONDS, STEP_SECONDS):
        host.now += STEP_SECONDS
        # Those behind first: only their claims keep the GPUs for the runs ahead.
        for run in reversed(host.runs):
            if run.is_listed and not run.is_suspended:
                run.renew() if run.gpus else run.poll()
        check_no_gpu_twice(host)
        if not any(run.waits and not run.held and run.could_start() for run in host.runs):
            return


SELECTIONS = st.sampled_from(["free:1", "free:2", "free:3", "free:4", "all", "0", "1,3"])
RUNS = st.tuples(st.integers(1, 3), SELECTIONS, st.sampled_from([1, 1, 2]), st.integers(-1, 1), st.booleans())
ON_RUN = st.sampled_from(["poll", "poll", "poll", "end", "kill", "suspend", "continue", "hold", "release"])
ACTIONS = st.one_of(
    st.tuples(st.just("start"), RUNS),
    st.tuples(ON_RUN, st.integers(0, 7)),
    st.tuples(st.sampled_from(["lose", "restore"]), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([1, 5, 20, 70])),
)


def act(host: Host, action: str, value: Any) -> None:
    if action == "start":
        uid, selection, share, priority, is_earlier = value
        host.runs.append(Run(host, uid, selection, share, priority, is_earlier=is_earlier))
    elif action == "lose":
        host.lost.add(value)
    elif action == "restore":
        host.lost.discard(value)
    elif action == "wait":
        host.now += value
        for run in host.runs:
            run.renewed_at = run.renewed_at if run.is_suspended else host.now
    elif (live := [run for run in host.runs if run.is_listed]) and (run := live[value % len(live)]):
        if action == "poll" and run.waits:
            run.poll()
        elif action == "kill" or (action == "end" and run.gpus):
            run.end()
        elif action in ("suspend", "continue"):
            run.is_suspended = action == "suspend"
        elif action in ("hold", "release"):
            run.held = action == "hold"


@given(st.lists(ACTIONS, min_size=4, max_size=25))
def test_queue_serves_every_run_in_order_and_no_gpu_twice(actions: list[tuple[str, Any]]) -> None:
    host = Host()
    with (
        mock.patch.multiple(allocation, time=host, read_reservations=host.read, user_lock=nullcontext),
        mock.patch.object(allocation, "private_folder_problem", lambda: None),
        mock.patch.object(run_queue, "time", host),
    ):
        for action, value in actions:
            act(host, action, value)
            check_no_gpu_twice(host)
        while True:
            settle(host)
            waiting = [run for run in host.runs if run.waits and not run.held]
            beside = [run for run in waiting if run.could_start()]
            for run in beside:
                # A run ahead keeps them, which waits for GPUs of other users.
                assert "is ahead in the queue" in run.reason, f"{run.name} waits beside free GPUs: {run.reason}"
            holders = [run for run in host.runs if run.gpus]
            if not holders:
                break
            holders[0].end()
        for run in waiting:
            assert not run.could_start(ignores_holders=True), f"{run.name} waits for ever: {run.reason}"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=3000, deadline=None)
@given(st.lists(ACTIONS, min_size=10, max_size=60))
def test_queue_of_many_actions(actions: list[tuple[str, Any]]) -> None:
    test_queue_serves_every_run_in_order_and_no_gpu_twice.hypothesis.inner_test(actions)  # type: ignore[attr-defined]
