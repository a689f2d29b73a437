"""Run folders: their layout, how they are found by name, whose they are, and the state of a run.

`engine.runs.ownership` creates and locks them. A folder that another user owns or can write
to is foreign: it is listed, and used only with --trust-owner.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from engine.base.errors import UsageError, file_errors
from engine.base.files import is_file, opened_folder
from engine.base.trust import foreign_reason
from engine.runs.claim import LOCK_FILE, is_claimed
from engine.runs.root import is_listed, is_run_folder

if TYPE_CHECKING:
    from engine.runs.batch.job import JobView
    from engine.runs.history import History

# Two confusion matrices of 1,000 classes take 24 MB, with counts of four digits.
MAX_EVALUATION_BYTES = 48 << 20
TRUST_OWNER_ADVICE = "use it anyway with --trust-owner"
# In the folder of the code: its record, and the copy from which a run with `run.snapshot` runs.
CODE_RECORD, CODE_COPY = "code.json", "copy"
# The settings in the folder of a sweep, which make it one. `engine.jobs.sweeps.folder` knows its other files.
SWEEP_FILE = "sweep.yaml"
_TRIAL = re.compile(r"(.+)-([0-9]{3,})")
OTHER_RUNS_FOLDER_ADVICE = "select another folder with --runs-dir or GPUTRAIN_RUNS"


class RunState(StrEnum):
    """State of a run. WAITING: its owner waits for GPUs. INTERRUPTED: its owner was killed while it waited. CRASHED: it
    did not end, and no process owns it."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"

    @property
    def live(self) -> bool:
        """Whether a process owns a run in this state."""
        return self in LIVE_STATES


LIVE_STATES = frozenset({RunState.WAITING, RunState.STARTING, RunState.RUNNING, RunState.PAUSED, RunState.STOPPING})
ENDED_BADLY = (RunState.FAILED, RunState.CRASHED, RunState.INTERRUPTED)


class PathOf:
    """A file or folder of a run or a sweep: the attribute is its path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files in one run folder, and the state of the run.

    `path` names the folder. `number` are device and inode of the folder that was there once, if that matters: it may be
    moved or deleted meanwhile, and another one may take its place.
    """

    kind: ClassVar[str] = "run"
    path: Path
    number: tuple[int, int] | None = field(default=None, compare=False)

    config = PathOf("config.yaml")
    """Resolved config, enough to repeat the run."""
    command = PathOf("command.json")
    """What the run starts, if that is the command of another program, see `engine.jobs.command.spec`."""
    code = PathOf("code")
    """Folder of the code of the run as it was when the run was made, see `engine.jobs.code.record`."""
    metrics = PathOf("metrics")
    """Folder of the metrics of a command, see `engine.jobs.command.metric_files`."""
    torchrun = PathOf("torchrun")
    """Folder of the logs that torchrun writes for each rank of a command."""
    journal = PathOf("events.jsonl")
    """Journal of the run, see `engine.runs.events`."""
    summary = PathOf("summary.json")
    """Record of the run, see `engine.runs.run_record`."""
    labels = PathOf("labels.json")
    """Tags, note and archive flag that the user has set, see `engine.runs.labels`."""
    log = PathOf("log.txt")
    """Log lines of the run, and the output of its ranks."""
    notify_log = PathOf("notify.log")
    """What became of the messages about the run, see `engine.jobs.notify`."""
    checkpoints = PathOf("checkpoints")
    """Folder of the checkpoints, see `engine.runs.checkpoint_files`."""
    tensorboard = PathOf("tensorboard")
    """Folder of the TensorBoard event files."""
    control = PathOf("control")
    """Folder of the control requests, see `engine.runs.control`."""
    owner = PathOf("owner.json")
    """Host, process and heartbeat of the owner, see `engine.runs.claim`."""
    lock = PathOf(LOCK_FILE)
    """Lock file on which the owner holds a write lock, see `engine.base.locks`."""
    private_lock = PathOf(".lock")
    """Lock file that only its user can open, which decides who owns the run."""
    queue = PathOf("queue.json")
    """Place of the run in the queue for GPUs, see `engine.jobs.queue.state`."""
    job = PathOf("job.json")
    """Job of the run in a batch system, see `engine.runs.batch.job`."""
    job_log = PathOf("job.log")
    """Output of the job."""
    class_indices = PathOf("class_indices.json")
    """Class names by index, as a JSON object."""
    evaluation = PathOf("evaluation.json")
    """Per-class results of the last and the best epoch; see `engine.runs.evaluations`."""
    inspection = PathOf("inspection.npz")
    """Results of each image of the last `gputrain evaluate --list`, see `engine.runs.inspection`."""
    export = PathOf("export")
    """Folder to which `gputrain export` writes by default."""
    profiles = PathOf("profile")
    """Folder of the profiles of training steps, see `engine.runs.profile_file`."""
    skipped_files = PathOf("skipped_files.txt")
    """List of the dataset files that are not used; written only if the warning cannot name them all."""

    def identified(self) -> RunFolder:
        """Return the folder with its number. Raises OSError unless the path is a folder."""
        status = self.status()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path))
        return replace(self, number=(status.st_dev, status.st_ino))

    @contextmanager
    def opened(self) -> Iterator[RunFolder]:
        """Yield the folder under a path that leads to it wherever it is moved. Raises OSError if it is gone."""
        with opened_folder(self.path) as path:
            status = path.stat()
            if self.number not in (None, (status.st_dev, status.st_ino)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
            yield RunFolder(path)

    @property
    def is_gone(self) -> bool:
        """Whether the folder was moved or deleted since it was identified."""
        try:
            status = self.status()
        except OSError as error:
            # ESTALE: another host of NFS deleted it. Other errors may pass.
            return self.number is not None and error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
        return self.number not in (None, (status.st_dev, status.st_ino))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def sweep(self) -> str:
        """Name of the sweep that the run is a trial of; "" if it is none."""
        name, _ = sweep_of_trial(self.name) or ("", None)
        # A list reads thousands, and a Path takes longer than the file system.
        return name if name and is_file(f"{self.path.parent}/{name}/{SWEEP_FILE}") else ""

    @property
    def resumable(self) -> bool:
        """Whether the run has a checkpoint to resume from, or a command to start again."""
        return any(self.checkpoints.glob("*.pt")) or is_file(self.command)

    @property
    def is_own(self) -> bool:
        """Whether the folder belongs to this user and nobody else can write to it."""
        return self.owner_problem() is None

    @property
    def is_of_this_user(self) -> bool:
        """Whether the folder belongs to this user."""
        return self.status().st_uid == os.geteuid()

    def owner_problem(self, status: os.stat_result | None = None) -> str | None:
        """Return why other users can change the folder itself, as a clause that follows its name; None if they cannot.
        `status` is that of the folder, if it is known.

        This is what lists show; `foreign_reason` also examines the files in the folder.
        """
        try:
            return foreign_reason(status or self.status(), trust_root=False)
        except OSError as error:
            return f"cannot be examined: {error.strerror}"

    def foreign_reason(self) -> str | None:
        """Return why other users can change the run, as a clause that follows its name; None if they cannot."""
        if (problem := self.owner_problem()) is not None:
            return problem
        for name, status in self._opened_entries():
            if (reason := foreign_reason(status)) is not None:
                return f"contains {name}, which {reason}"
        return None

    def link_problem(self) -> str | None:
        """Return which file or folder of the run is a link and leads out of it, as such a clause; None if none is."""
        links = (name for name, status in self._opened_entries() if stat.S_ISLNK(status.st_mode))
        return next((f"contains the link {name}" for name in links), None)

    def require_own(self, *, trust_owner: bool, can_trust: bool = True) -> None:
        """Raise UsageError if the run contains a link, or if other users can change it and they are not trusted.

        `can_trust` is False for a command without --trust-owner."""
        if (problem := self.link_problem()) is not None:
            advice = "replace the link by what it leads to"
            raise UsageError.one(str(self.path), f"this {self.kind} {problem}", advice, code="is-link")
        if not trust_owner and (problem := self.foreign_reason()) is not None:
            closes = f"remove write permission for others with `chmod -R go-w {shlex.quote(str(self.path))}`"
            advice = ", or ".join([closes] * self.is_of_this_user + [TRUST_OWNER_ADVICE] * can_trust)
            reason = f"this {self.kind} is not trusted: it {problem}"
            raise UsageError.one(str(self.path), reason, advice, code="foreign-writable")

    def restrict_umask(self) -> None:
        """Let no file that this process creates from here on be more open than the folder."""
        os.umask(os.umask(0o077) | ~self.status().st_mode & 0o777)

    def status(self) -> os.stat_result:
        """Return the status of the folder itself. Raises OSError."""
        return self.path.lstat()

    def _opened_entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yield name and status of the existing files and folders of a run that gputrain opens by name."""
        outputs = (self.checkpoints, self.tensorboard, self.export)
        code = (self.code, self.code / CODE_RECORD, self.code / CODE_COPY)
        folders = (*outputs, *code, self.control, self.metrics, self.torchrun)
        locks = (self.lock, self.private_lock)
        files = (self.config, self.journal, self.summary, self.log, self.owner, *locks, self.class_indices)
        more_files = (
            self.evaluation,
            self.inspection,
            self.labels,
            self.queue,
            self.job,
            self.job_log,
            self.skipped_files,
        )
        profiles = (self.profiles, *self.profiles.glob("step-*"), *self.profiles.glob("step-*/*"))
        for path in (*folders, *files, *more_files, self.command, *self.checkpoints.glob("*.pt"), *profiles):
            with suppress(OSError):
                yield path.relative_to(self.path), path.lstat()

    def history(self) -> History:
        """Return the history of the run from its whole journal."""
        # Events and their records take 20 ms to import, and the first frame of the screen needs none.
        from engine.runs.history import history_from_events
        from engine.runs.journal import JournalReader

        return history_from_events(JournalReader(self.journal).poll())

    def state(self, recorded: RunState, *, is_owned: bool | None = None) -> RunState:
        """Return the state of the run now, from the one that its journal or its record has. `is_owned` is what the
        caller has found out before it read the record."""
        if self.is_owned() if is_owned is None else is_owned:
            # The owner resumes a run that has ended.
            return recorded if recorded.live else RunState.STARTING
        if (view := self.job_view(recorded)) is not None:
            return view.state
        if not recorded.live:
            return recorded
        return RunState.INTERRUPTED if recorded is RunState.WAITING else RunState.CRASHED

    def job_view(self, recorded: RunState) -> JobView | None:
        """Return what its job in a batch system says of the run, which no process owns and whose record has this state;
        None if nothing."""
        # A Path takes longer than the file system.
        if not is_file(f"{self.path}/job.json"):
            return None
        from engine.runs.batch.job import view_job

        return view_job(self, recorded)

    def is_owned(self) -> bool:
        """Whether a live process owns the run, see `engine.runs.claim`."""
        return is_claimed(self.owner)


def final_state(state: str) -> RunState:
    """Convert the state of a `run_finished` event; an unknown state counts as failed."""
    return RunState(state) if state in set(RunState) and not RunState(state).live else RunState.FAILED


def list_runs(root: Path) -> list[RunFolder]:
    """Return all runs in `root` by name. Raises UsageError if the folder cannot be read."""
    return [RunFolder(path) for path in paths_in(root) if is_listed(path.name) and is_run_folder(path)]


def paths_in(root: Path) -> list[Path]:
    """Return what is in a runs folder by name, nothing without one. Raises UsageError if it cannot be read."""
    with (
        file_errors("runs folder", f"{root} cannot be read", OTHER_RUNS_FOLDER_ADVICE),
        suppress(FileNotFoundError, NotADirectoryError),
    ):
        return sorted(root.iterdir())
    return []


def sweep_of_trial(run_name: str) -> tuple[str, int] | None:
    """Return the name of the sweep and the number of the trial that a run may be, by its name."""
    match = _TRIAL.fullmatch(run_name)
    return (match[1], int(match[2])) if match else None
