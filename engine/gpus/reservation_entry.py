"""The entry of a reservation: what a run writes for other processes.

`reservation` writes it, `reservation_reader` reads it with what the file system says of its files.
"""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated

from engine.base.codec import FileRecord, Meta, Record, UnixTime
from engine.base.errors import UsageError
from engine.base.files import read_bytes, settings_file
from engine.base.trust import name_of_user
from engine.gpus.queue_terms import (
    MAX_DEVICES,
    MAX_PATH_CHARS,
    MAX_TIME,
    NumSharers,
    Priority,
    QueuePosition,
    QueueTerms,
    Text,
)

MAX_RANKS = 1024
MAX_PID = 1 << 22  # PID_MAX_LIMIT of Linux
MAX_RANK = 1 << 20

Devices = Annotated[tuple[str, ...], Meta(max_length=MAX_DEVICES)]
ArrivalTime = Annotated[float, Meta(ge=0, le=MAX_TIME)]


class ReservedRank(Record, frozen=True):
    """A rank of a run: its PID, and the UUID of its CUDA device."""

    run: Text
    rank: Annotated[int, Meta(ge=0, le=MAX_RANK)]
    pid: Annotated[int, Meta(ge=0, le=MAX_PID)]
    uuid: Text


class ReservationEntry(FileRecord, QueueTerms, frozen=True, kw_only=True):
    """The file of a reservation.

    `since` is the Unix time at which the run joined the queue, `selection` its `device.gpus`. `gpus` contains the
    `CudaDevice.uuid` of each of its devices, and is empty while it waits. `visible` contains that of each
    device that is visible to it.

    `reason` is why it waits. The terms have no defaults here: without `blocked`, a run that claims no devices would
    claim some.
    """

    priority: Priority
    blocked: Text
    share: NumSharers
    run: Text
    since: ArrivalTime
    selection: Text
    visible: Devices
    gpus: Devices
    ranks: Annotated[tuple[ReservedRank, ...], Meta(max_length=MAX_RANKS)]
    reason: Text = ""


class ReservationInfo(ReservationEntry, frozen=True, kw_only=True):
    """The reservation of a live run: its file, as far as other users can trust it, and what the file system says.

    `uid` is the user who owns its files, which are in `user_folder`; `lock_name` is the name of its lock file.
    `renewed_at` is the Unix time at which its supervisor last renewed it.
    """

    uid: Annotated[int, Meta(ge=0, lt=1 << 32)]
    user_folder: str
    lock_name: str
    position: QueuePosition
    renewed_at: UnixTime = 0.0
    is_silent: bool = False
    """Whether its supervisor does not answer: it is suspended, or hangs."""

    @property
    def user(self) -> str:
        return name_of_user(self.uid)

    @property
    def is_waiting(self) -> bool:
        return not self.gpus

    @property
    def is_ready(self) -> bool:
        """Whether it waits for GPUs only."""
        return self.is_waiting and not self.blocked

    @property
    def key(self) -> tuple[int, str]:
        """Unique key of the reservation, which no other user can imitate."""
        return self.uid, self.lock_name

    def holds(self, *device_ids: str | None) -> bool:
        """Whether it holds one of the devices with these UUID."""
        return not set(device_ids).isdisjoint(self.gpus)

    def run_folder(self) -> str:
        """Return the run folder, which only its user can read; empty for runs of other users."""
        if self.uid != os.geteuid():
            return ""
        try:
            name = self.lock_name.removesuffix(".lock")
            return os.fsdecode(read_bytes(reservations_root() / self.user_folder / f"{name}.folder", MAX_PATH_CHARS))
        except OSError:
            return self.folder


def reservations_root() -> Path:
    """Return the folder in which all users of the host reserve GPUs: $GPUTRAIN_RESERVATIONS, else that of the settings,
    else /tmp."""
    if folder := os.environ.get("GPUTRAIN_RESERVATIONS"):
        return Path(folder)
    return _root_of_settings(settings_file()) or Path("/tmp")  # noqa: S108 (known to all users of the host)


@cache
def _root_of_settings(path: Path) -> Path | None:
    """Return the folder that the settings file of the user names, None without one. No run starts if it is invalid."""
    if path.exists():
        # Takes 0.2 s to import.
        from engine.config.settings import read_settings

        with suppress(UsageError):
            folder = read_settings().reservations
            return None if folder is None else Path(folder)
    return None
