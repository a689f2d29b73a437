"""The queue of runs that wait for GPUs: which free devices the runs ahead of this one claim.

Called by `allocation`. The order is that of `queue_terms.queue_order`.

A run ahead claims as many of the devices that are free as it waits for. If they are not enough for it, nobody behind it
gets them, unless it allows it (`queue.backfill`) to a run that ends soon enough (`queue.time_limit`). Devices beyond
its claim, and devices that it cannot use, are free for the runs behind it. A run that shares its devices
(`queue.share`, `queue.min_free`) joins no GPU that a run ahead waits for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

from engine.gpus.current_use import Obstacle, Unavailable
from engine.gpus.reservation_reader import ReservationInfo
from engine.gpus.selection import CudaDevice, NotFreeError, lack_of_memory, select, select_named
from engine.utils.errors import UsageError

# A waiting run polls once per second. One that does not reserve the devices that it waits for, within this time after
# they became free, is suspended or does not intend to.
CLAIM_TIMEOUT_SECONDS = 15.0


class RunQueue:
    """The runs ahead of this one, observed by polling.

    With `wait`, the timeout applies to each user, not to each run: a user may create new entries without end. Without,
    it applies to all users together, and only once. `time_limit_s` is the most that this run trains, 0 if it has no
    limit.
    """

    def __init__(self, *, wait: bool, time_limit_s: float = 0.0) -> None:
        self._wait, self._time_limit_s = wait, time_limit_s
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
            elif waiter.backfill_until and 0 < self._time_limit_s <= waiter.backfill_until - time.time():
                # This run ends before the one ahead, whose devices are not all free, wants the free ones for itself.
                continue
            queued = Unavailable(Obstacle.QUEUED, f"run {waiter.run} (user {waiter.user}) is ahead in the queue")
            by_id |= {device.reservation_id: replace(device, unavailable=queued) for device in claimed}
        self._servable_since = servable_since if self._wait else self._servable_since | servable_since


def _claimed_devices(waiter: ReservationInfo, by_id: dict[str, CudaDevice]) -> tuple[list[CudaDevice], bool]:
    """Return the devices that a waiting run claims, and whether they may be all that it waits for.

    It claims free devices. While they are not enough, it also claims those that only this run could join, because it
    shares them with fewer runs or needs more memory of them.
    """
    visible = [_as_seen_by(waiter, by_id[name]) for name in waiter.visible if name in by_id]
    try:
        chosen = select(waiter.selection, visible, only_free=True, shares=waiter.shares)
        return _free_devices(chosen, by_id), bool(chosen)
    except NotFreeError:
        pass
    except UsageError:
        # Unless this process does not see all of them, the run can never get its devices.
        if len(visible) == len(waiter.visible):
            return [], False
    # A device that this process does not see may be free. A user can name devices that do not exist.
    is_servable = len(visible) < len(waiter.visible)
    shared = [device for device in visible if not device.is_free and by_id[device.reservation_id].is_free]
    candidates = [device for device in visible if device.is_free or device in shared]
    if match := re.fullmatch(r"free:(\d+)", waiter.selection):
        free = [device for device in visible if device.is_free]
        free = sorted(free, key=lambda device: (device.memory_used or 0, device.index))[: int(match[1])]
        return _free_devices([*free, *shared], by_id), is_servable
    if waiter.selection in ("auto", "all"):
        return _free_devices(candidates, by_id), is_servable
    try:
        named = select_named(waiter.selection, candidates)
    except UsageError:
        named = [device for device in candidates if str(device.index) in waiter.selection.split(",")]
    return _free_devices(named, by_id), is_servable


def _as_seen_by(waiter: ReservationInfo, device: CudaDevice) -> CudaDevice:
    """Return a device with the state that it has for a waiting run, which may share devices with fewer runs than this
    one, or need more memory."""
    if not device.is_free:
        return device
    if device.sharers and device.sharers >= waiter.max_runs:
        return replace(device, unavailable=Unavailable(Obstacle.RESERVED, "shared by other runs"))
    if not waiter.min_free:
        return replace(device, unavailable=device.other_use)
    return replace(device, unavailable=lack_of_memory(device.unreserved_bytes, waiter.min_free))


def _free_devices(chosen: Sequence[CudaDevice], by_id: dict[str, CudaDevice]) -> list[CudaDevice]:
    """Return those of the devices that are free for this run, too."""
    return [by_id[device.reservation_id] for device in chosen if by_id[device.reservation_id].is_free]
