"""The queue of runs that wait for GPUs: which free devices the runs ahead of this one claim.

Called by `allocation`. The order is that of `ReservationInfo.since`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.gpus.reservation_reader import ReservationInfo
from engine.gpus.selection import CudaDevice, NotFreeError, Obstacle, Unavailable, select, select_named
from engine.utils.errors import UsageError

# A waiting run polls once per second. One that does not reserve the devices that it waits for, within this time after
# they became free, is suspended or does not intend to.
CLAIM_TIMEOUT_SECONDS = 15.0


class RunQueue:
    """The runs ahead of this one, observed by polling.

    With `wait`, the timeout applies to each user, not to each run: a user may create new entries without end. Without,
    it applies to all users together, and only once.
    """

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait
        self._servable_since: dict[int | None, float] = {}
        """For each user with a run whose devices may all be free: the monotonic time since when there is such a run.
        The key None stands for all users."""
        self.is_moving = False
        """Whether a run ahead is about to reserve its devices."""

    def mark_claimed(self, waiters: Sequence[ReservationInfo], by_id: dict[str, CudaDevice]) -> None:
        """Mark the free devices that waiting runs claim as not free.

        `waiters` are the runs ahead in queue order, `by_id` contains the devices by `reservation_id`. A run that could
        reserve its devices claims nothing after the timeout.
        """
        now, servable_since, self.is_moving = time.monotonic(), dict[int | None, float](), False
        for waiter in waiters:
            claimed, is_servable = _claimed_devices(waiter, by_id)
            if is_servable:
                user = waiter.uid if self._wait else None
                servable_since[user] = self._servable_since.get(user, now)
                if now - servable_since[user] > CLAIM_TIMEOUT_SECONDS:
                    continue
                self.is_moving = True
            queued = Unavailable(Obstacle.QUEUED, f"run {waiter.run} (user {waiter.user}) is ahead in the queue")
            by_id |= {device.reservation_id: replace(device, unavailable=queued) for device in claimed}
        self._servable_since = servable_since if self._wait else self._servable_since | servable_since


def _claimed_devices(waiter: ReservationInfo, by_id: dict[str, CudaDevice]) -> tuple[list[CudaDevice], bool]:
    """Return the free devices that a waiting run claims, and whether they may be all that it waits for."""
    visible = [by_id[name] for name in waiter.visible if name in by_id]
    try:
        chosen = select(waiter.selection, visible, only_free=True)
        return chosen, bool(chosen)
    except NotFreeError:
        pass
    except UsageError:
        # Unless this process does not see all of them, the run can never get its devices.
        if len(visible) == len(waiter.visible):
            return [], False
    # A device that this process does not see may be free. A user can name devices that do not exist.
    is_servable = len(visible) < len(waiter.visible)
    free = [device for device in visible if device.is_free]
    if match := re.fullmatch(r"free:(\d+)", waiter.selection):
        return sorted(free, key=lambda device: (device.memory_used or 0, device.index))[: int(match[1])], is_servable
    if waiter.selection in ("auto", "all"):
        return free, is_servable
    try:
        return select_named(waiter.selection, free), is_servable
    except UsageError:
        return [device for device in free if str(device.index) in waiter.selection.split(",")], is_servable
