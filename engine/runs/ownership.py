"""Ownership of a run: the lock and the heartbeat in its folder, which prevent two processes from training the same run.

`claim_run` makes the folder of a new run, or takes that of the run to resume; `engine.jobs.launch.preflight` checks
before whether it can. `RunFolder.is_owned` checks lock and heartbeat. An owner whose folder was moved or deleted ends
with its next heartbeat, and so does its run."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from engine.base.codec import overwrite_record, replace, write_record
from engine.base.errors import CodedError, UsageError, file_errors
from engine.base.files import file_size
from engine.base.host import nearest_existing
from engine.base.locks import OwnerLock
from engine.base.process import boot_id, process_start_ticks, seconds_since_boot, user_name
from engine.base.trust import is_shared
from engine.base.wait import wait_until
from engine.runs.claim import Claim, observe_claim, read_claim, watch_claims
from engine.runs.control import consume_requests
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, RunFolder, RunState
from engine.runs.root import LAST_RUN, is_run_folder
from engine.runs.run_record import read_run_record

HEARTBEAT_INTERVAL_SECONDS = 5.0
# Less than `MOVE_TIMEOUT_SECONDS` of `engine.runs.claim`.
LATE_HEARTBEAT_SECONDS = 10.0
# After a `kill -9`, orphaned DataLoader workers hold the lock until they have exited.
LOCK_TIMEOUT_SECONDS = 1.0


class OwnershipLostError(CodedError):
    """This process owns its run folder no longer, and must end. The message says why in a sentence."""


class RunFolderGoneError(OwnershipLostError):
    """The folder of a run was moved or deleted."""

    code = "run-deleted"


class RunTakenOverError(OwnershipLostError):
    """Another process has taken the run over, so this one must not write to the folder any more."""

    code = "taken-over"


class Ownership:
    """Exclusive ownership of a run folder: a lock, which the kernel releases when the process ends, and a
    heartbeat in `owner.json` for other hosts. `folder` is identified.
    """

    def __init__(self, folder: RunFolder, agents: Sequence[str] = ()) -> None:
        """Acquire the folder. Raises UsageError if another process owns it.

        Watches a claim of another host for seconds, unless this process has done that before, see `watch_claims`."""
        self.folder = folder
        self._last_heartbeat, self._token = -math.inf, uuid.uuid4().hex
        self._lock = lock = _acquire(folder, _resume_advice(folder))
        try:
            # A record that is older than its lock may be that of an earlier session.
            lock.publish()
        except BaseException:
            lock.close()
            raise
        self._journal_start = file_size(folder.journal)
        self._earlier_claim = read_claim(folder.owner)
        self._claim = Claim(
            host=socket.gethostname(),
            pid=os.getpid(),
            agents=tuple(agents),
            user=user_name(),
            boot_id=boot_id(),
            start_ticks=process_start_ticks(os.getpid()),
            token=self._token,
            journal_start=self._journal_start,
            write_lock=lock.has_write_lock,
        )
        self._renew()

    def renew_heartbeat(self) -> None:
        """Write the heartbeat if it is due.

        Errors are ignored, because a full disk must not end a run. Raises RunFolderGoneError and RunTakenOverError.
        """
        # Includes suspended time: after it, this process may own the run no longer.
        if seconds_since_boot() - self._last_heartbeat < HEARTBEAT_INTERVAL_SECONDS:
            return
        if self.folder.is_gone:
            raise RunFolderGoneError(
                f"the run folder {self.folder.path} was moved or deleted, so the run ends; if it was moved, "
                "`gputrain resume FOLDER` goes on there"
            )
        self._check_token()
        self._renew()

    def check_late(self) -> None:
        """Raise RunTakenOverError if another process took over the run while this one was suspended."""
        if seconds_since_boot() - self._last_heartbeat > LATE_HEARTBEAT_SECONDS:
            self._check_token()

    def _check_token(self) -> None:
        claim = read_claim(self.folder.owner)
        # If the disk is full, that of the owner before is still there.
        if claim is not None and claim.token != self._token and claim != self._earlier_claim:
            raise RunTakenOverError(
                f"{claim.process} has taken over the run, whose heartbeat it had not seen for a while; this process "
                "ends without a checkpoint",
            )

    def _renew(self) -> None:
        self._last_heartbeat = seconds_since_boot()
        self._lock.renew()
        self._write_owner(round(time.time(), 3))

    def _write_owner(self, heartbeat: float | None) -> None:
        self._claim = replace(self._claim, write_lock=self._lock.has_write_lock)
        claim = replace(self._claim, heartbeat=heartbeat, uptime_s=round(seconds_since_boot(), 3))
        try:
            write_record(self.folder.owner, claim)
        except OSError:
            # Without heartbeats, other hosts would take the run on a full disk for dead.
            with suppress(OSError):
                overwrite_record(self.folder.owner, claim)

    def release(self) -> None:
        """Release the lock; a heartbeat of null marks the run as unowned for other hosts."""
        # Two hosts may take over a run at the same time. The one that ends must leave the claim of the other.
        if not self.folder.is_gone:
            with suppress(RunTakenOverError):
                self._check_token()
                self._write_owner(None)
        self._lock.close()


@contextmanager
def locked_ended_run(folder: RunFolder) -> Iterator[RunFolder]:
    """Hold a run that has ended under its lock, so that no process can resume it meanwhile. Yields the folder.

    Watches a claim of another host, as `Ownership` does.

    Raises UsageError if a process owns the run, or if its path leads elsewhere, and OSError.
    """
    known = folder.identified()
    lock = _acquire(known, f"stop it first with `gputrain stop {shlex.quote(folder.name)}`")
    try:
        yield known
    finally:
        lock.close()


def _acquire(folder: RunFolder, advice: str) -> OwnerLock:
    """Return the lock of an identified run that no process owns. Raises UsageError and OSError."""
    lock = wait_until(partial(OwnerLock.take, folder.lock, folder.private_lock), LOCK_TIMEOUT_SECONDS)
    if lock is None:
        raise _owned_by_another(folder, advice)
    try:
        # Not every network file system shares locks between hosts.
        watch_claims([folder.owner])
        observed = observe_claim(folder.owner)
        # Somebody may have deleted the lock of a live process, which has written it again.
        if (observed is not None and observed.moves) or lock.is_taken():
            raise _owned_by_another(folder, advice)
        if folder.is_gone:
            # It was renamed or moved to the trash while this process waited for its lock.
            raise UsageError.one(folder.name, f"{folder.path} was moved or deleted meanwhile", code="run-changed")
    except BaseException:
        lock.close()
        raise
    return lock


def check_not_owned(folder: RunFolder) -> None:
    """Raise UsageError if a process owns the run. Does not watch claims of other hosts."""
    observed = observe_claim(folder.owner)
    if observed.moves if observed else not wait_until(lambda: not folder.is_owned(), LOCK_TIMEOUT_SECONDS):
        raise _owned_by_another(folder, _resume_advice(folder))


def try_lock_unclaimed(folder: RunFolder) -> OwnerLock | None:
    """Return the lock of a run, which the caller closes; None if a process owns it, or one of another host claims it.
    Does not wait. Raises OSError."""
    return None if observe_claim(folder.owner) is not None else OwnerLock.take(folder.lock, folder.private_lock)


def _owned_by_another(folder: RunFolder, advice: str) -> UsageError:
    claim = read_claim(folder.owner)
    process = "process ? on another host" if claim is None else claim.process
    observed = observe_claim(folder.owner)
    if observed is not None and not observed.moves:
        # The lock of a host that is gone stays until the file server notices.
        reason = f"is locked, perhaps still by {process}"
        return UsageError.one(
            folder.name, reason, "try again later, or use a new name with --name", code="already-running"
        )
    record = read_run_record(folder)
    does = "waiting for GPUs" if record is not None and record.state is RunState.WAITING else "running"
    return UsageError.one(folder.name, f"is already {does} as {process}", advice, code="already-running")


def _resume_advice(folder: RunFolder) -> str:
    return f"stop it with `gputrain stop {shlex.quote(folder.name)}`, or use a new name with --name"


@dataclass
class ClaimedRun:
    """A run folder that this process owns. `created_parents` are the parent folders that were created with it."""

    folder: RunFolder
    ownership: Ownership
    is_new: bool
    created_parents: list[Path] = field(default_factory=list)

    def keep(self) -> None:
        """Keep the folder, in which the run has started."""
        self.is_new = False

    def discard(self) -> None:
        """Delete a new run folder and the parents created with it; keep the folder of a resumed run."""
        if not self.is_new or self.folder.is_gone:
            return
        shutil.rmtree(self.folder.path, ignore_errors=True)
        with suppress(OSError):
            for parent in self.created_parents:
                parent.rmdir()


def check_claim(root: Path, name: str | None, *, resume: bool, trust_owner: bool = False) -> RunFolder | None:
    """Check that `claim_run` can succeed, without leaving anything behind. Return the folder of the run to resume.

    Does not watch claims of other hosts. Raises UsageError as `claim_run` does."""
    if name is not None and resume and is_run_folder(root / name):
        folder = RunFolder(root / name)
        folder.require_own(trust_owner=trust_owner)
        check_not_owned(folder)
        return folder
    if name is not None and os.path.lexists(root / name):
        raise _name_in_use(root, name)
    _check_name(name)
    with _making_folder(root), tempfile.TemporaryFile(dir=nearest_existing(root)):
        return None


def claim_run(
    root: Path,
    name: str | None,
    stem: str,
    *,
    resume: bool,
    agents: Sequence[str] = (),
    trust_owner: bool = False,
) -> ClaimedRun:
    """Create and own the folder of a new run, or own the existing one if `resume` is set.

    Without a name the run is called `stem-N`. `agents` identify the run's torchrun agents. `trust_owner` accepts a
    folder that other users can change. Raises UsageError if the name is in use or the folder cannot be written to.
    """
    is_new = name is None or not resume or not is_run_folder(root / name)
    if is_new:
        _check_name(name)
    with _making_folder(root):
        new_parents = [parent for parent in (root, *root.parents) if not parent.exists()]
        root.mkdir(parents=True, exist_ok=True)
        path = _create_run_folder(root, name, stem) if is_new else root / str(name)
        try:
            folder = RunFolder(path).identified()
            folder.require_own(trust_owner=trust_owner)
            folder.restrict_umask()
            claimed = ClaimedRun(folder, Ownership(folder, agents), is_new, new_parents)
        except BaseException:
            with suppress(OSError):
                # Only an empty folder, which was created here.
                path.rmdir()
            raise
    # What an earlier owner may have left: unread requests and incomplete checkpoints.
    for _ in consume_requests(folder.control):
        pass
    for path in folder.checkpoints.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    return claimed


def _create_run_folder(root: Path, name: str | None, stem: str) -> Path:
    """Create a folder in which only this user can write, and in a shared runs folder also read. Raises OSError."""
    mode = 0o700 if is_shared(root.stat()) else 0o755
    for candidate in [name] if name is not None else (f"{stem}-{number}" for number in count(1)):
        with suppress(FileExistsError):
            (root / candidate).mkdir(mode)
            return root / candidate
    raise _name_in_use(root, str(name))


def _check_name(name: str | None) -> None:
    """Raise UsageError if a new run must not have this name."""
    if name == LAST_RUN:
        reason = f"{name} is reserved: it stands for the newest run, as in `gputrain attach {name}`"
        raise UsageError.one("run.name", reason, "use another name with --name", code="invalid-name")


def _name_in_use(root: Path, name: str) -> UsageError:
    if (root / name).is_symlink():
        return UsageError.one(
            "run.name", f"{name} is a symbolic link in {root}", "use a new name with --name", code="name-in-use"
        )
    if not is_run_folder(root / name):
        # Resuming cannot work here.
        reason = f"{name} already exists in {root} and is not a run"
        return UsageError.one("run.name", reason, "use a new name with --name", code="name-in-use")
    advice = f"resume it with --resume, use a new name with --name, or delete it with `gputrain runs delete {name}`"
    return UsageError.one("run.name", f"the run {name} already exists in {root}", advice, code="name-in-use")


def _making_folder(root: Path) -> AbstractContextManager[None]:
    return file_errors("runs folder", f"{root} cannot be written to", OTHER_RUNS_FOLDER_ADVICE, code="not-writable")
