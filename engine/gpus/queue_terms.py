"""The terms on which a run waits for GPUs, and the order of the queue that follows from those of all runs.

The supervisor of a run chooses its terms (`engine.jobs.queue`), `reservation` publishes them, and `run_queue` and
`engine.jobs.queue.listing` order the reservations that `reservation_reader` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from engine.base.codec import UNSET, Meta, Record, UnsetType

if TYPE_CHECKING:
    from engine.gpus.reservation_entry import ReservationInfo

MAX_STRING_CHARS = 1024
MAX_PATH_CHARS = 4096  # PATH_MAX of Linux
MAX_DEVICES = 1024
MAX_PRIORITY = 1 << 20
MAX_TIME = 1e11  # in Unix seconds
MAX_MEMORY_BYTES = 1 << 50

Text = Annotated[str, Meta(max_length=MAX_STRING_CHARS)]
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
QueuePosition = Annotated[float, Meta(ge=-MAX_TIME, le=MAX_TIME)]
"""A Unix time, or an order that is comparable with one."""
NumSharers = Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
MemoryBytes = Annotated[int, Meta(ge=0, le=MAX_MEMORY_BYTES)]
BeginTime = Annotated[float, Meta(ge=0, le=MAX_TIME)]
# What a run waits for before it waits for GPUs: a release, other runs, its begin time, a limit of its user.
Blocked = Literal["", "held", "dependency", "begin", "limit"]


class QueueTerms(Record, frozen=True, kw_only=True):
    """How a run waits. Among the runs of one user, the highest `priority` is first, then the lowest `position`.

    `position` is the Unix time at which the run was submitted, unless the user has moved it; an unknown one is that of
    arrival. A run that is `blocked` for a reason of `Blocked` claims no devices. `begin` is the Unix time before which
    it does not start, 0 if it has none. `folder` is the run folder.

    Runs share a device if all of them allow it: up to `share` runs, or as many as its memory is enough for if they
    reserve `min_free` bytes of it. A run with a `share` of 1 and no `min_free` has its devices for itself.
    """

    priority: Priority = 0
    position: QueuePosition | UnsetType = UNSET
    blocked: Text = ""
    share: NumSharers = 1
    min_free: MemoryBytes = 0
    begin: BeginTime = 0.0
    folder: Annotated[str, Meta(max_length=MAX_PATH_CHARS)] = ""

    @property
    def has_arrived(self) -> bool:
        """Whether the run could start now, but for devices and limits of its user. As in Slurm, a run at such a limit
        (`AssocGrp…`) keeps nobody else waiting, and its place."""
        return self.blocked in ("", "limit")

    @property
    def max_runs(self) -> int:
        """The number of runs on a device that the run allows, with itself."""
        return MAX_DEVICES if self.min_free and self.share == 1 else self.share

    @property
    def shares(self) -> bool:
        """Whether the run allows others on its devices."""
        return self.max_runs > 1


WHOLE_DEVICES = QueueTerms()
"""The terms of a run that has its devices for itself, and does not wait."""


def own_order(reservation: ReservationInfo) -> tuple[int, float, float, tuple[int, str]]:
    """Sort key of a run among the runs of its user."""
    return -reservation.priority, reservation.position, reservation.since, reservation.key


def queue_order(reservations: Sequence[ReservationInfo]) -> list[ReservationInfo]:
    """Return the runs that wait for GPUs only, in the order in which they get them.

    Each arrival is a slot that belongs to the user who arrived. Users order their own runs over their own slots, so
    that no priority delays a run of another user.
    """
    slots = sorted((each for each in reservations if each.is_ready), key=lambda each: (each.since, each.key))
    by_user: dict[int, Iterator[ReservationInfo]] = {
        uid: iter(sorted((each for each in slots if each.uid == uid), key=own_order))
        for uid in {each.uid for each in slots}
    }
    return [next(by_user[slot.uid]) for slot in slots]
