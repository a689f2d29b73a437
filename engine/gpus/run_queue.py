"""Who starts next: what each run that waits for GPUs keeps from the runs behind it, and why these may pass it.

Called by `allocation`. The order is that of `queue_terms.queue_order`. `claim_of` decides on data alone: an entry, and
the devices as the run of that entry sees them. So each run computes the same claims, its own too, and publishes them as
the reason why it waits.

A run claims as many of the free devices as it waits for. If they are not enough for it, nobody behind it gets them. It
claims only what it can get from others: while runs of its own user keep it waiting, runs of other users pass, and while
a broken GPU or a supervisor that does not answer does, all later runs pass. A run that shares its devices
(`queue.share`, `queue.min_free`) joins no GPU that a run ahead claims.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engine.base.errors import UsageError
from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.queue_terms import QueueTerms
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.selection import CPU, CudaDevice, NotFreeError, preference, select, select_named, why_not_free

# A run reserves the devices that it waits for once they are free. One whose supervisor answers for this long without
# doing so does not intend to.
CLAIM_TIMEOUT_SECONDS = 15.0
# The same for all runs of a user together, in timeouts of one: they may replace each other without end.
USER_CLAIM_TIMEOUTS = 8
SILENT = "its supervisor does not answer, so later runs may start first"

# Devices by UUID, as a run with these terms sees them.
View = Callable[[QueueTerms], Mapping[str, CudaDevice]]


@dataclass(frozen=True)
class DeviceClaim:
    """The devices that a waiting run keeps from the runs behind it, by UUID.

    `may_start`: they may be all that it waits for. `passed_because` is why runs of other users may pass it until that
    changes, as a clause; empty if they may not. Runs of its own user may pass it too if it claims nothing.
    """

    devices: frozenset[str] = frozenset()
    may_start: bool = False
    passed_because: str = ""

    @property
    def note(self) -> str:
        """What follows the reason why the run waits."""
        if not self.passed_because:
            return ""
        return f"; {'runs of other users' if self.devices else 'later runs'} may start first"


@dataclass(frozen=True)
class Turn:
    """The devices as a run sees them in its turn: those that runs ahead claim are not free.

    `passes` are the runs that could use the devices and that it passes if it starts now, each with the reason.
    `is_moving`: a run ahead is about to reserve its devices.
    """

    devices: Mapping[str, CudaDevice]
    passes: Sequence[str] = ()
    is_moving: bool = False


@dataclass
class RunQueue:
    """The runs ahead of this one, observed by polling.

    Without `wait`, the timeout applies to all users together, and only once.
    """

    wait: bool
    uid: int = field(default_factory=os.geteuid)
    _since: dict[Hashable, float] = field(default_factory=dict, init=False)
    """Since when a run, a run of a user, or any run could start, in seconds of the clock of `_clocks`."""

    def take_turn(self, ahead: Sequence[ReservationInfo], terms: QueueTerms, view: View) -> Turn:
        """Return the turn of a run with these terms behind the waiting runs `ahead`, which are in queue order."""
        own, claimed, passes, is_moving = view(terms), dict[str, Unavailable](), list[str](), False
        since, idle_users = dict[Hashable, float](), set[int]()
        for waiter in ahead:
            if all(name in claimed or not device.is_free for name, device in own.items()):
                break
            claim = claim_of(waiter, with_claims(view(waiter), claimed))
            because = claim.passed_because if waiter.uid != self.uid or not claim.devices else ""
            if claim.may_start:
                for key, now, timeout_s in self._clocks(waiter):
                    since[key] = self._since.get(key, now)
                    if now - since[key] > timeout_s:
                        idle_users.add(waiter.uid)
                if waiter.uid in idle_users:
                    because = "it does not take the GPUs that it waits for"
                is_moving |= not because
            if because:
                passes.append(f"{waiter.run} (user {waiter.user}): {because}")
                continue
            reason = f"run {waiter.run} (user {waiter.user}) is ahead in the queue"
            queued = Unavailable(Obstacle.QUEUED, reason, users=frozenset({waiter.user}))
            claimed |= dict.fromkeys(claim.devices - claimed.keys(), queued)
        self._since = since if self.wait else self._since | since
        return Turn(with_claims(own, claimed), passes, is_moving)

    def _clocks(self, waiter: ReservationInfo) -> Iterator[tuple[Hashable, float, float]]:
        """Yield the clocks that say that a run does not start although it could: a key, the time, and the timeout.

        The clock of a run is that of its supervisor, which may be slow on a busy host."""
        if not self.wait:
            yield None, time.monotonic(), CLAIM_TIMEOUT_SECONDS
            return
        # Its user can give the entry any time.
        yield waiter.key, min(waiter.renewed_at, time.time()), CLAIM_TIMEOUT_SECONDS
        yield waiter.uid, time.monotonic(), USER_CLAIM_TIMEOUTS * CLAIM_TIMEOUT_SECONDS


def claim_of(waiter: ReservationInfo, devices: Mapping[str, CudaDevice]) -> DeviceClaim:
    """Return what a waiting run claims of the devices that it sees, without those that runs ahead of it claim."""
    if waiter.is_silent:
        return DeviceClaim(passed_because=SILENT)
    # It asks the driver which it sees once it is in the queue.
    names = frozenset(waiter.visible) or devices.keys() - {CPU.uuid}
    visible = [device for name, device in devices.items() if name in names]
    if not visible:
        return DeviceClaim()
    # A device that this process does not see may be free. A user can name devices that do not exist.
    sees_all = len(visible) == len(names)
    try:
        chosen = select(waiter.selection, visible, only_free=True, shares=waiter.shares)
        return DeviceClaim(_ids(chosen), may_start=bool(chosen))
    except NotFreeError:
        pass
    except UsageError as error:
        if sees_all:
            return DeviceClaim(passed_because=error.problems[0].reason)
    count, wanted = _wanted(waiter.selection, visible)
    free = sorted((device for device in wanted if device.is_free), key=preference)
    held = [device for device in wanted if device.unavailable is not None]
    by_user = [device for device in held if device.users]
    by_others = [device for device in by_user if waiter.user not in device.users]
    # Also those that a run behind it could join, because it shares them with more runs or needs less memory of them.
    claimed = _ids([*free[:count], *by_user])
    if not sees_all or len(free) + len(by_others) >= count:
        return DeviceClaim(claimed, may_start=not sees_all)
    because = why_not_free([device for device in held if device not in by_others])
    return DeviceClaim(claimed if len(free) + len(by_user) >= count else frozenset(), passed_because=because)


def _wanted(selection: str, visible: Sequence[CudaDevice]) -> tuple[int, Sequence[CudaDevice]]:
    """Return how many devices a run needs before it starts, and of which."""
    if match := re.fullmatch(r"free:(\d+)", selection):
        count = int(match[1])
        return count, [device for device in visible if device.mig_ids is None or count == 1]
    if selection == "auto":
        return 1, visible
    if selection == "all":
        whole = [device for device in visible if device.mig_ids is None] or visible
        return len(whole), whole
    try:
        named = select_named(selection, visible)
    except UsageError:
        named = [device for device in visible if str(device.index) in selection.split(",")]
    return len(named), named


def with_claims(devices: Mapping[str, CudaDevice], claimed: Mapping[str, Unavailable]) -> dict[str, CudaDevice]:
    """Return the devices; those that are free and `claimed` are not free."""
    return {
        name: replace(device, unavailable=claimed[name]) if device.is_free and name in claimed else device
        for name, device in devices.items()
    }


def _ids(devices: Sequence[CudaDevice]) -> frozenset[str]:
    return frozenset(device.uuid for device in devices)
