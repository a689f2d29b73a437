"""Allocation of GPUs to a run: resolves `device.gpus`, waits in the queue if requested, and reserves the devices.

Called by `engine.jobs.launch` and `engine.train.bench`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from engine.base import codec
from engine.base.errors import Problem, UsageError
from engine.config.limits import NO_LIMITS
from engine.config.settings import Limits
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.driver import RUN_ON_CPU, describe_cpu_fallback, describe_driver_failure, has_driver_library
from engine.gpus.monitor import DriverMonitor, first_snapshot, recording_path
from engine.gpus.own_limits import OwnRuns, over_limit
from engine.gpus.private_mount import private_folder_problem
from engine.gpus.queue_terms import QueueTerms, queue_order
from engine.gpus.reservation import Reservation, ReservationError, user_lock
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.reservation_reader import PolledReservations, read_reservations
from engine.gpus.run_queue import RunQueue, Turn, claim_of
from engine.gpus.selection import (
    CPU,
    CPU_ADVICE,
    CudaDevice,
    NotFreeError,
    cuda_devices,
    mark_reserved,
    select,
    use_warnings,
    why_not_free,
)
from engine.gpus.snapshot import SamplerOptions, Snapshot
from engine.gpus.visible_devices import visible_devices

WAIT_POLL_SECONDS = 1.0
# A sampler has half of the memory of a run that waits. After that long it rests while no reading can change anything.
BRIEF_WAIT_SECONDS = 60.0
BY_RUNS = (Obstacle.RESERVED, Obstacle.QUEUED)
READING = "a GPU is released; its state is read"
MAX_PROBLEMS = 10
NOT_REPORTED = Unavailable(Obstacle.LOST, "the driver does not report it")
RECORDING_REASON = "GPUTRAIN_NVML replays recorded GPUs, which cannot train (unset it to use the GPUs of this host)"

# The devices of this host for a run with these terms, marked as unavailable if one of the reservations holds them.
DeviceLister = Callable[[Sequence[ReservationInfo], QueueTerms], list[CudaDevice]]
# The current terms on which a run waits, and why it is blocked, "" if it is not. Called once per second; may raise.
TermsPoller = Callable[[], tuple[QueueTerms, str]]


@dataclass
class GpuAllocation:
    """The devices of a run, none for the CPU, and warnings for the user.

    One of the warnings is `cpu_fallback`, if the run trains on the CPU although this host has GPUs. The caller releases
    the `reservation` when the run ends.
    """

    devices: list[CudaDevice] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    reservation: Reservation = field(default_factory=Reservation)
    cpu_fallback: Problem | None = None
    reservation_problems: list[Problem] = field(default_factory=list)
    """What other users did to the shared folder of reservations; these are warnings, too."""

    def choose(
        self, chosen: Sequence[CudaDevice], devices: Sequence[CudaDevice], snapshot: Snapshot | None, selection: str
    ) -> None:
        """Set the devices of the run and add the warnings that follow. `devices` are those that are visible."""
        self.devices = list(chosen)
        if not chosen and selection != "cpu":
            self.cpu_fallback = describe_cpu_fallback(snapshot, devices, os.environ)
            self.warnings += [] if self.cpu_fallback is None else [self.cpu_fallback]
        self.warnings += use_warnings(chosen)


def allocate_devices(
    selection: str,
    run: str,
    *,
    wait: bool,
    on_wait: Callable[[str], None],
    ranks: int | None = None,
    poll_terms: TermsPoller = lambda: (QueueTerms(), ""),
    limits: Limits = NO_LIMITS,
) -> GpuAllocation:
    """Reserve the devices that `selection`, a value of `device.gpus`, selects within CUDA_VISIBLE_DEVICES.

    `run` is the run name that other users see. With `wait`, block until the devices are free; the CPU is one of them.
    Without, block for at most `run_queue.CLAIM_TIMEOUT_SECONDS` while runs ahead in the queue are about to reserve
    them. `on_wait` receives the reason once per second.

    `ranks` is the number of ranks that an external launcher started on this host: "auto" then reserves that many
    devices, if necessary shared. While the terms of `poll_terms` are blocked, the run is listed in the queue and
    claims nothing; afterwards it joins at the end of the queue. A run at a limit in `limits` claims nothing either and
    keeps its place; without `wait`, it is refused. Raises UsageError if the selection is invalid or not available.
    """
    own = OwnRuns(limits, selection)
    allocator = _Allocator(selection, run, wait, ranks, poll_terms, on_wait, own)
    try:
        allocator.wait_while_blocked()
        return _allocate(allocator)
    except BaseException:
        allocator.reservation.release()
        raise


def _allocate(allocator: _Allocator) -> GpuAllocation:
    """Allocate the devices of a run that is not blocked. Raises UsageError."""
    if allocator.selection == "cpu" or recording_path() is not None:
        return allocator.allocate_cpu(None)
    if allocator.wait:
        # The driver may take seconds to answer, and the order of arrival counts.
        allocator.enqueue(())
    if not has_driver_library():
        return allocator.allocate_cpu(None)
    with closing(DriverMonitor(SamplerOptions(period=WAIT_POLL_SECONDS, activity=False))) as monitor:
        snapshot = first_snapshot(monitor)
        is_away = snapshot is None or snapshot.error is not None
        if is_away and not (allocator.wait and allocator.selection != "auto"):
            return allocator.allocate_cpu(snapshot)
        return allocator.allocate(snapshot, monitor)


def fall_back_to_cpu(selection: str, snapshot: Snapshot | None, *, wait: bool = False) -> GpuAllocation:
    """Train on the CPU if `selection` allows it, because no GPU can be chosen from the snapshot.

    Raises UsageError: a NotFreeError if a run that waits also waits for the driver."""
    allocation, is_recorded = GpuAllocation(), recording_path() is not None
    if selection not in ("auto", "cpu"):
        reason = RECORDING_REASON if is_recorded else describe_driver_failure(snapshot)
        kind = NotFreeError if wait and not is_recorded and has_driver_library() else UsageError
        raise kind.one(
            "device.gpus",
            f"{selection} cannot be used: {reason}",
            CPU_ADVICE,
            code="driver-unavailable",
        )
    if is_recorded and selection == "auto":
        allocation.warnings.append(Problem("", f"{RECORDING_REASON}; {RUN_ON_CPU}", code="gpu-fallback"))
    else:
        allocation.choose([], [], snapshot, selection)
    return allocation


@dataclass
class _Allocator:
    """Parameters of `allocate_devices`, and the loop that retries until the devices are reserved."""

    selection: str
    run: str
    wait: bool
    ranks: int | None
    poll_terms: TermsPoller
    on_wait: Callable[[str], None]
    own: OwnRuns = field(default_factory=OwnRuns)
    reservation: Reservation = field(default_factory=Reservation, init=False)
    _queue: RunQueue = field(init=False)
    _terms: QueueTerms = field(default_factory=QueueTerms, init=False)
    _known: dict[str, CudaDevice] = field(default_factory=dict, init=False)
    """The devices that the run may use, by UUID: a lost one may be back a moment later."""
    _reservations: PolledReservations = field(default_factory=PolledReservations, init=False)
    _problems: dict[Problem, None] = field(default_factory=dict, init=False)
    """Each distinct `GpuAllocation.reservation_problems`, in the order in which they were found."""
    _is_full: bool = field(default=False, init=False)
    """Whether runs hold or claim all devices, whatever the driver says."""
    _rests: bool = field(default=False, init=False)
    """Whether the snapshot is an old one, on which no device may be chosen."""

    def __post_init__(self) -> None:
        self._queue = RunQueue(wait=self.wait)

    def enqueue(self, visible_ids: Sequence[str]) -> None:
        """Join the queue for GPUs, or return to the same place in it. Raises UsageError."""
        self.reservation.enqueue(self.selection, visible_ids, self.run)

    def wait_while_blocked(self) -> None:
        """Wait without querying the driver until the run is not blocked."""
        while reason := self._poll_terms(()):
            self._report(reason)
            time.sleep(WAIT_POLL_SECONDS)

    def _poll_terms(self, visible_ids: Sequence[str]) -> str:
        """Publish the current terms and return why the run is blocked, "" if it is not."""
        self.reservation.renew()
        had_arrived = self._terms.has_arrived
        self._terms, reason = self.poll_terms()
        self.own.num_visible = len(visible_ids)
        if self.wait and not self._terms.blocked:
            reason = self._limit_reached()
            if reason:
                self._terms = codec.replace(self._terms, blocked="limit")
        if self._terms.has_arrived and not had_arrived and self.reservation.key is not None:
            # Else a user could hold a place in front of others with runs that do not want to start yet.
            self.reservation.rejoin()
        self.reservation.set_terms(self._terms, reason or None)
        if self._terms.blocked and self.reservation.key is None:
            self.enqueue(visible_ids)
        return reason

    def _limit_reached(self) -> str:
        """Return which limit of its user keeps the run from its start now, "" if none does. Raises UsageError."""
        if self.own.limits == NO_LIMITS:
            return ""
        self.own.update(self._reservations.read(self._warn), self.reservation.key, wait=self.wait)
        return self.own.reached()

    def allocate(self, snapshot: Snapshot | None, monitor: DriverMonitor) -> GpuAllocation:
        """Allocate from the GPUs of the driver. A run that waits also waits while the driver is away."""
        allocation, visible = GpuAllocation(reservation=self.reservation), list[CudaDevice]()
        started_at = time.monotonic()
        while True:
            if snapshot is None or snapshot.error is not None:
                if not self.wait:
                    return self.allocate_cpu(snapshot)
                reason = self._poll_terms(tuple(self._known)) or describe_driver_failure(snapshot)
            else:
                visible = visible or visible_devices(cuda_devices(snapshot), os.environ)
                wait_reason = self._attempt(allocation, partial(cuda_devices, snapshot), visible, snapshot)
                if wait_reason is None:
                    return allocation
                reason = wait_reason
            self._report(reason)
            self._rests = self._is_full and time.monotonic() - started_at > BRIEF_WAIT_SECONDS
            if self._rests:
                monitor.rest()
                time.sleep(WAIT_POLL_SECONDS)
            else:
                snapshot = monitor.read(WAIT_POLL_SECONDS) or monitor.latest() or snapshot

    def allocate_cpu(self, snapshot: Snapshot | None) -> GpuAllocation:
        """Train on the CPU if the selection allows it; a run that waits reserves it. Raises UsageError."""
        allocation = fall_back_to_cpu(self.selection, snapshot)
        # Of an external launcher, one process per node is here, and the nodes of a run may be on one host.
        if not self.wait or self.ranks is not None:
            self.reservation.release()
            return replace(allocation, reservation=self.reservation)
        self.selection = CPU.uuid
        turn = GpuAllocation(reservation=self.reservation)
        # Only the reservations show whether it is free.
        while (reason := self._attempt(turn, partial(mark_reserved, [CPU]), [CPU])) is not None:
            self._report(reason)
            time.sleep(WAIT_POLL_SECONDS)
        turn.devices, turn.warnings = [], allocation.warnings + turn.reservation_problems
        return replace(turn, cpu_fallback=allocation.cpu_fallback)

    def _report(self, reason: str) -> None:
        self.reservation.set_terms(self._terms, reason)
        self.on_wait(reason)

    def _attempt(
        self,
        allocation: GpuAllocation,
        list_devices: DeviceLister,
        visible: Sequence[CudaDevice],
        snapshot: Snapshot | None = None,
    ) -> str | None:
        """Fill `allocation` and return None, or join the queue and return the reason for waiting."""
        self._known = {device.uuid: device for device in visible}
        try:
            if reason := self._poll_terms(tuple(self._known)):
                return reason
            with nullcontext() if self.own.limits == NO_LIMITS else user_lock():
                wait_reason = self._try_allocate(allocation, list_devices, snapshot)
            if wait_reason is None and not allocation.devices:
                self.reservation.release()
            return wait_reason
        except ReservationError as error:
            if not self.wait or self.reservation.key is None:
                raise
            # The disk may be full, or the folder of reservations may be gone for a while.
            return error.problems[0].reason

    def _try_allocate(
        self, allocation: GpuAllocation, list_devices: DeviceLister, snapshot: Snapshot | None
    ) -> str | None:
        turn, passed_note = self._take_turn(list_devices)
        visible_ids = tuple(self._known)
        devices = [turn.devices[name] for name in visible_ids]
        self._is_full = all(device.unavailable and device.unavailable.obstacle in BY_RUNS for device in devices)
        if self._rests and not self._is_full:
            return READING
        is_claimed_soon = turn.is_moving and any(device.is_queued for device in devices)
        if reason := self._limit_reached():
            if not self.wait:
                raise over_limit(reason)
            return reason
        try:
            only_free, shares = self.wait or bool(self._terms.min_free), self._terms.shares
            chosen = select(self.selection, devices, only_free=only_free, ranks=self.ranks, shares=shares)
            chosen, warnings = self.own.check_chosen(chosen)
        except NotFreeError as error:
            if self.wait:
                self.enqueue(visible_ids)
            elif not is_claimed_soon:
                raise
            return error.problems[0].reason + passed_note
        # With `ranks`, a device that is not free may be chosen.
        if is_claimed_soon and (not chosen or (self.ranks and not all(device.is_free for device in chosen))):
            return f"no GPU is free: {why_not_free(devices)}"
        if chosen:
            # Devices may have become free because a run has failed, which may hold this one.
            if reason := self._poll_terms(visible_ids):
                return reason
            chosen_ids = [device.uuid for device in chosen]
            self.reservation.reserve(chosen_ids, self.selection, visible_ids, self.run)
            self.reservation.set_terms(codec.replace(self._terms, blocked=""))
            if self._has_conflict(chosen, list_devices):
                self.enqueue(visible_ids)
                return "another run has reserved the same GPUs at the same time"
            if turn.passes:
                reason = f"started before runs ahead in the queue: {'; '.join(turn.passes)}"
                warnings.append(Problem("", reason, code="queue-passed"))
        allocation.warnings += warnings
        allocation.choose(chosen, devices, snapshot, self.selection)
        if chosen and (problem := private_folder_problem()) is not None:
            self._warn(problem)
        allocation.reservation_problems = list(self._problems)
        allocation.warnings += allocation.reservation_problems
        return None

    def _take_turn(self, list_devices: DeviceLister) -> tuple[Turn, str]:
        """Return the turn of this run, and a note for its reason if runs behind it may pass it."""
        reservations = self._reservations.read(self._warn)
        others = [reservation for reservation in reservations if reservation.key != self.reservation.key]
        # Of hundreds of runs, most wait, and hold nothing.
        holders = [reservation for reservation in others if not reservation.is_waiting]
        views: dict[tuple[int, int], dict[str, CudaDevice]] = {}

        def view(terms: QueueTerms) -> dict[str, CudaDevice]:
            if (key := (terms.share, terms.min_free)) not in views:
                lost = {name: replace(device, unavailable=NOT_REPORTED) for name, device in self._known.items()}
                views[key] = lost | {device.uuid: device for device in list_devices(holders, terms)}
            return views[key]

        # A run that may only join GPUs keeps its place, too.
        mine = [each for each in reservations if each.key == self.reservation.key]
        mine = [codec.replace(each, blocked="", is_silent=False) for each in mine]
        queue = queue_order([*others, *mine])
        place = next((place for place, waiter in enumerate(queue) if waiter.key == self.reservation.key), len(queue))
        turn = self._queue.take_turn(queue[:place], self._terms, view)
        return turn, "".join(claim_of(each, turn.devices).note for each in mine)

    def _has_conflict(self, chosen: Sequence[CudaDevice], list_devices: DeviceLister) -> bool:
        """Whether another run has reserved a device that was free when it was chosen.

        Two runs may choose the same device. Each reads the reservations after it has written its own, so at least one
        of them notices. It returns to the queue, where the earlier run comes first."""
        others = [each for each in read_reservations(report=self._warn) if each.key != self.reservation.key]
        free = {device.uuid for device in list_devices(others, self._terms) if device.is_free}
        return any(device.is_free and device.uuid not in free for device in chosen)

    def _warn(self, problem: Problem) -> None:
        # Another user can change the entries while the run waits.
        if len(self._problems) < MAX_PROBLEMS:
            self._problems[problem] = None
