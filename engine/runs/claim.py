"""The claim of a process on a run, `owner.json`: who claims the run, and whether that process still lives.

The lock of the run decides about a process of this kernel, in whatever container and under whatever host name it runs,
unless somebody has deleted it: a live owner writes it again with its next heartbeat.
Not every network file system shares locks between hosts, and some have no write locks, so a heartbeat decides about
another host and about an owner without a write lock. Clocks differ, so
a process is alive if its heartbeat was seen to change, and dead if it was seen unchanged for
`HEARTBEAT_TIMEOUT_SECONDS`. Until then, lists show a guess from its date, and `watch_claims` waits for more.

`engine.runs.ownership` writes claims. `engine.runs.folder` asks `is_claimed` for the state of a run.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine.base.codec import (
    ENTRIES,
    Count,
    FileRecord,
    Seconds,
    UnixTime,
    field,
    find_record,
)
from engine.base.files import is_file
from engine.base.locks import is_held
from engine.base.process import boot_id, process_start_ticks
from engine.base.text import printable

# An owner on another host counts as dead after this time without a new heartbeat.
HEARTBEAT_TIMEOUT_SECONDS = 30.0
# A live owner renews its heartbeat every 5 s, so one that lives is seen within this time.
MOVE_TIMEOUT_SECONDS = 12.0
WATCH_POLL_SECONDS = 0.25
# A longer poll was blocked by a file server, which blocks the heartbeats, too, or this process was suspended.
LATE_POLL_SECONDS = 2.0
# One of another user may be of any size.
MAX_OWNER_BYTES = 1 << 20
MAX_TEXT_CHARS = 100
LOCK_FILE = "lock"


class Claim(FileRecord, frozen=True, kw_only=True):
    """Content of `owner.json`. Another user may have written any text."""

    host: str = ""
    pid: Count | None = None
    agents: Annotated[tuple[str, ...], ENTRIES] = ()
    """The agents of torchrun that started its ranks."""
    user: str = ""
    heartbeat: UnixTime | None = None
    """The time by the clock of the owner, None once it has released the run."""
    boot_id: str = ""
    uptime_s: Seconds = 0.0
    """The time since the boot at that heartbeat."""
    start_ticks: Count | None = None
    """When the process started, in clock ticks since the boot."""
    token: str = field(default="", name="claim")
    """Random text that no other claim has."""
    journal_start: Count = 0
    """Size of the journal in bytes when the process acquired the run: its events follow."""
    write_lock: bool = False
    """Whether the process holds a write lock on the lock file. Else its heartbeat shows that it lives."""

    @property
    def process(self) -> str:
        """The process as printable text, like `process 7 on node7`."""
        host = printable(self.host[:MAX_TEXT_CHARS])
        return f"process {'?' if self.pid is None else self.pid} on {host or 'another host'}"

    @property
    def is_of_this_kernel(self) -> bool:
        """Whether its process runs on this kernel, also in another container, so that its locks are visible here."""
        if self.boot_id and boot_id():
            return self.boot_id == boot_id()
        return self.host in ("", socket.gethostname())

    @property
    def is_of_namesake(self) -> bool:
        """Whether its process ran on a host of the same name with another kernel. In nearly all cases, that is this
        host before it booted again."""
        return self.host == socket.gethostname() and not self.is_of_this_kernel

    @property
    def is_recent(self) -> bool:
        """Whether the last heartbeat is not old by the clock of this host. The clock of the owner may be ahead."""
        return self.heartbeat is not None and time.time() - self.heartbeat < HEARTBEAT_TIMEOUT_SECONDS

    @property
    def is_process_here(self) -> bool:
        """Whether `pid` is that process in this PID namespace."""
        if not self.is_of_this_kernel or self.pid is None or self.pid <= 1:
            return False
        return self.start_ticks is not None and self.start_ticks == process_start_ticks(self.pid)

    def last_heartbeat(self) -> str:
        """Return when the last heartbeat was, by the clock of its host."""
        if self.heartbeat is None:
            return "unknown"
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.heartbeat))


@dataclass(frozen=True)
class ObservedClaim:
    """A claim of a process whose lock may not be visible. `moves`: this process has seen its heartbeat change lately.
    `still_s` is for how long it has seen it unchanged, in seconds. `written_at` is the Unix time of the file."""

    claim: Claim
    written_at: float
    moves: bool
    still_s: float

    @property
    def lives(self) -> bool:
        """Whether its process lives, as far as is known without waiting: by the date of a heartbeat that was not
        watched for long."""
        # A file server may have set the time of the file.
        is_recent = self.claim.is_recent or abs(time.time() - self.written_at) < HEARTBEAT_TIMEOUT_SECONDS
        return self.moves or (is_recent and self.still_s < HEARTBEAT_TIMEOUT_SECONDS)

    @property
    def patience_s(self) -> float:
        """For how long its heartbeat must not change before its process counts as dead, in seconds."""
        if self.claim.is_recent:
            return MOVE_TIMEOUT_SECONDS if self.claim.is_of_namesake else HEARTBEAT_TIMEOUT_SECONDS
        # This host before it booted again, in nearly all cases.
        return 0.0 if self.claim.host == socket.gethostname() else MOVE_TIMEOUT_SECONDS

    @property
    def is_uncertain(self) -> bool:
        """Whether its heartbeat has to be watched."""
        return not self.moves and self.still_s < self.patience_s


@dataclass
class _Sighting:
    """A heartbeat that this process saw first at `since`, in monotonic seconds, and whether it saw another before."""

    marker: tuple[object, ...]
    since: float
    moved: bool = False


_sightings: dict[tuple[int, int], _Sighting] = {}
"""The latest heartbeat that this process has seen of each run, by device and inode of the run folder."""
_sightings_lock = threading.Lock()


def read_claim(owner: Path) -> Claim | None:
    """Return the claim in an `owner.json`; None if it cannot be read."""
    return find_record(owner, Claim, MAX_OWNER_BYTES)


def observe_claim(owner: Path) -> ObservedClaim | None:
    """Return the claim of a process that has not released the run, and what this process has seen of its heartbeat.

    None if the lock alone decides: the run has no claim, or one of a process of this kernel that holds a write lock,
    which nobody has deleted."""
    claim = read_claim(owner)
    if claim is None or claim.heartbeat is None:
        return None
    if claim.is_of_this_kernel and claim.write_lock and is_file(owner.with_name(LOCK_FILE)):
        return None
    try:
        folder, status = owner.parent.stat(), owner.stat()
    except OSError:
        return None
    # Some file systems have times of 2 s, some reuse inodes, and a clock that was set back repeats heartbeats.
    marker = (status.st_mtime_ns, status.st_ino, claim.heartbeat, claim.uptime_s)
    key, now = (folder.st_dev, folder.st_ino), time.monotonic()
    with _sightings_lock:
        sighting = _sightings.get(key) or _Sighting(marker, now)
        if sighting.marker != marker:
            sighting = _Sighting(marker, now, moved=True)
        _sightings[key] = sighting
    still_s = now - sighting.since
    return ObservedClaim(claim, status.st_mtime, sighting.moved and still_s < HEARTBEAT_TIMEOUT_SECONDS, still_s)


def is_claimed(owner: Path) -> bool:
    """Whether a live process owns the run, as far as this process can know without waiting."""
    observed = observe_claim(owner)
    # The clock of a host that booted again may be behind its last heartbeat: no date decides about a namesake.
    if observed is not None and (observed.moves or not observed.claim.is_of_namesake):
        return observed.lives
    try:
        return is_held(owner.with_name(LOCK_FILE))
    except OSError:
        return False


def uncertain_claims(owners: Sequence[Path]) -> dict[Path, float]:
    """Return the claims of other hosts that are undecided, by the path of their `owner.json`, with their
    `patience_s`."""
    observed = {owner: observe_claim(owner) for owner in owners}
    return {owner: each.patience_s for owner, each in observed.items() if each is not None and each.is_uncertain}


def watch_claims(owners: Sequence[Path], check_stop: Callable[[], None] = lambda: None) -> None:
    """Wait until each claim of another host is known to live or to be dead: its heartbeat was seen to change, or seen
    unchanged for its `patience_s`.

    All are watched at the same time. Time in which nothing could be read does not count. `check_stop` is called
    repeatedly, and may raise."""
    waits = uncertain_claims(owners)
    while waits:
        check_stop()
        began = time.monotonic()
        time.sleep(WATCH_POLL_SECONDS)
        observed = {owner: observe_claim(owner) for owner in waits}
        took_s = time.monotonic() - began
        lost_s = took_s if took_s > LATE_POLL_SECONDS else 0.0
        waits = {
            owner: patience_s + lost_s
            for owner, patience_s in waits.items()
            if (each := observed[owner]) is not None and not each.moves and each.still_s < patience_s + lost_s
        }
