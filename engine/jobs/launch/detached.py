"""Start a command that outlives its starter: in its own session, without the terminal, its output in an unnamed file.

`tui.screens.launcher` starts runs from the screen and the command line with it, `engine.jobs.sweeps` the trials of a
sweep. `gputrain queue resume` starts runs again whose wait in the queue was interrupted, for example by a reboot."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from engine.base.errors import Problem, UsageError
from engine.base.process import process_start_ticks
from engine.base.systemd import lingering_scope, loginctl_enabled
from engine.base.wait import wait_until
from engine.jobs.queue.state import QueueStage, read_queue_state
from engine.runs.claim import Claim, read_claim
from engine.runs.folder import RunFolder, list_runs

if TYPE_CHECKING:
    from engine.jobs.queue.listing import QueueRow

ACCEPT_POLL_SECONDS = 0.05


@dataclass
class LaunchedRun:
    """A supervisor process started by `start_detached`; `output` is an unnamed file with its stdout and stderr."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    runs_dir: Path
    warning: Problem | None
    launched_at: float
    """Unix seconds."""
    start_ticks: int | None = None
    """When the process started, in clock ticks since the boot; None if that is unknown."""
    has_command: bool = False
    """Whether it runs a command of another program that it was given."""
    begun: Callable[[], object] = lambda: None
    """What the screen does when the run has begun."""
    claimed: RunFolder | None = None
    """The folder of the run, before it has begun there; of a resumed run from the start."""
    _other_owners: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Modification time and inode of each `owner.json` that names another process."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def output_lines(self) -> list[str]:
        """Return what the supervisor has printed so far."""
        # pread, because a seek would move the file offset that the supervisor writes at.
        handle = self.output.fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace").splitlines()

    def find_folder(self) -> RunFolder | None:
        """Return the run folder once the run has begun or ended there. A refused start deletes the folder again.

        Reads the owners of all runs, so the screen calls it in a thread."""
        try:
            runs = list_runs(self.runs_dir)
        except UsageError:
            return None
        with self._lock:
            claims = ((run, claim) for run in runs if (claim := self._claim(run)))
            run, claim = next(claims, (None, None))
            self.claimed = run or self.claimed
        return run if claim is not None and run is not None and _has_begun(run, claim) else None

    def wait_until_accepted(self) -> RunFolder | None:
        """Return the folder of a run that was started with `--detach`, once it stays whatever becomes of the run.

        Return None if the command exited before."""
        while (folder := self._find_accepted()) is None:
            if self.exit_code is not None:
                # It may have been accepted and have ended since the folders were read.
                return self._find_accepted()
            time.sleep(ACCEPT_POLL_SECONDS)
        return folder

    def _find_accepted(self) -> RunFolder | None:
        for run in list_runs(self.runs_dir):
            if self._claim(run) is not None:
                state = read_queue_state(run)
                if state is not None and state.pid == self.process.pid:
                    return run
        return None

    def _claim(self, run: RunFolder) -> Claim | None:
        """Return the claim of this process on a run, which may have ended; None if it has none."""
        try:
            status = run.owner.stat()
        except OSError:
            return None
        stamp = (status.st_mtime_ns, status.st_ino)
        # There may be thousands of runs.
        if self._other_owners.get(run.path) == stamp or not run.is_own:
            return None
        claim = read_claim(run.owner)
        # PIDs are reused, but not with the same start in the same boot.
        process = self.process.pid, self.start_ticks
        if claim is not None and (claim.pid, claim.start_ticks) == process and claim.is_of_this_kernel:
            return claim
        self._other_owners[run.path] = stamp
        return None

    @property
    def exit_code(self) -> int | None:
        """Exit code of the supervisor, or None while it runs."""
        return self.process.poll()


def _has_begun(run: RunFolder, claim: Claim) -> bool:
    """Return whether the journal has the start or the end of this session. Warnings may precede its start."""
    from engine.runs.events import RunFinished, WaitingForGpus
    from engine.runs.journal import SESSION_TYPES, JournalReader

    # By the place in the journal: the clock of the host may be set while the run starts.
    reader = JournalReader(run.journal)
    reader.offset = claim.journal_start
    return any(True for _ in reader.poll(kinds=(*SESSION_TYPES, WaitingForGpus, RunFinished)))


def start_detached(command: Sequence[str], runs_dir: Path, environ: Mapping[str, str] = os.environ) -> LaunchedRun:
    """Start a `gputrain` command in its own session with the environment `environ`, and `runs_dir` as its runs folder.

    Raises UsageError if it cannot be started.
    """
    scope, warning = systemd_scope_prefix()
    output = tempfile.TemporaryFile()  # noqa: SIM115 (read while the run starts)
    environment = {key: value for key, value in environ.items() if key not in ("COLUMNS", "LINES")}
    launched_at = time.time()
    try:
        process = subprocess.Popen(  # noqa: S603 (our own command)
            [*scope, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment | {"GPUTRAIN_RUNS": str(runs_dir)},
            start_new_session=True,
        )
    except OSError as error:
        output.close()
        raise UsageError.one(command[0], f"cannot be started: {error.strerror}", code="not-started") from error
    start_ticks = process_start_ticks(process.pid)
    # A screen forgets a run once it has a folder, and would keep its zombie until it ends itself.
    threading.Thread(target=process.wait, name="reaper", daemon=True).start()
    return LaunchedRun(process, output, runs_dir, warning, launched_at, start_ticks, "--" in command)


def systemd_scope_prefix() -> tuple[list[str], Problem | None]:
    """Return a command prefix that keeps a process alive after logout, or a warning if there is none.

    With KillUserProcesses=yes (logind.conf(5)), systemd kills the processes of a user at logout.
    """
    if not loginctl_enabled("KillUserProcesses"):
        return [], None
    if scope := lingering_scope():
        return scope, None
    reason = (
        "this host kills your processes at logout (KillUserProcesses=yes): the run will NOT survive it. "
        "To keep it running: loginctl enable-linger"
    )
    return [], Problem("", reason, code="not-supported")


LISTED_TIMEOUT_SECONDS = 30.0
# Starts `gputrain` with these arguments and this runs folder, detached. Raises UsageError.
StartCommand = Callable[[Sequence[str], Path], LaunchedRun]


@dataclass(frozen=True)
class ResumedWait:
    """What became of a run: `output` is what its command printed if it did not start."""

    row: QueueRow
    output: tuple[str, ...] = ()
    accepted: bool = True


def resume_waits(rows: Sequence[QueueRow], start: StartCommand, flags: Sequence[str] = ()) -> Iterator[ResumedWait]:
    """Start interrupted runs one after the other, each once the one before it is in the queue.

    `flags` are those of `gputrain resume`. Raises UsageError if a command cannot be started."""
    for row in rows:
        folder = Path(row.folder)
        launched = start(["resume", "--headless", "--detached", *flags, row.folder], folder.parent)
        accepted = wait_until_queued(launched)
        yield ResumedWait(row, () if accepted else tuple(launched.output_lines()), accepted is not None)


def wait_until_queued(launched: LaunchedRun) -> RunFolder | None:
    """Wait until a detached run is listed in the queue, or does not wait; None if it was refused."""
    if (folder := launched.wait_until_accepted()) is None:
        return None

    def has_joined() -> bool:
        state = read_queue_state(folder)
        if launched.exit_code is not None or state is None or state.stage is not QueueStage.WAITING:
            return True
        # The first frame of the screen needs no list.
        from engine.jobs.queue.listing import list_queue

        return any(row.folder == str(folder.path) for row in list_queue())

    wait_until(has_joined, LISTED_TIMEOUT_SECONDS)
    return folder
