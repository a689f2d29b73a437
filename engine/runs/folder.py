"""Run folders: where they are, what is in them, who owns one, what state it is in, and requests to its owner."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.runs.history import History, history_from_events
from engine.runs.journal import JournalReader
from engine.utils.errors import UsageError, did_you_mean
from engine.utils.files import expand_user, is_file, is_locked, read_json

HEARTBEAT_TIMEOUT_SECONDS = 30.0


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    CRASHED = "crashed"

    @property
    def live(self) -> bool:
        return self in (RunState.STARTING, RunState.RUNNING, RunState.PAUSED, RunState.STOPPING)


def runs_root(override: str | None = None) -> Path:
    """The folder that runs lie in: as given, else $GPUTRAIN_RUNS, else ./runs. Raises UsageError."""
    return expand_user(override or os.environ.get("GPUTRAIN_RUNS") or "runs").absolute()


def sanitize_run_name(stem: str) -> str:
    """A file's name made into the beginning of a run's: what a run's name may not hold becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:80] or "run"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, and the names of what is in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def owner(self) -> Path:
        return self.path / "owner.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def class_indices(self) -> Path:
        return self.path / "class_indices.json"

    @property
    def evaluation(self) -> Path:
        """What the evaluations of the last and of the best epoch found, class by class; see
        `engine.training.metrics`."""
        return self.path / "evaluation.json"

    @property
    def skipped_files(self) -> Path:
        return self.path / "skipped_files.txt"

    @property
    def resumable(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return any(self.checkpoints.glob("*.pt"))

    def history(self) -> History:
        """What the journal adds up to by now."""
        return history_from_events(JournalReader(self.journal).poll())

    def state(self, history: History) -> RunState:
        """What the journal says, and whether anyone is still there to go on with it."""
        if not self.is_owned():
            return _final_state(history.finished.state) if history.finished else RunState.CRASHED
        if history.started is None or history.finished is not None or history.failures:
            # Of failures without an end one is followed by another start.
            return RunState.STARTING
        if history.stopping:
            return RunState.STOPPING
        return RunState.PAUSED if history.paused else RunState.RUNNING

    def is_owned(self) -> bool:
        """Whether a process has the run in its hands."""
        owner = read_json(self.owner)
        if owner is not None and owner.get("host") != socket.gethostname():
            # A lock says nothing across hosts on every file system; the heartbeat does, null where the owner left.
            heartbeat = owner.get("heartbeat")
            return isinstance(heartbeat, int | float) and time.time() - heartbeat < HEARTBEAT_TIMEOUT_SECONDS
        try:
            return is_locked(self.lock)
        except OSError:
            return False


def _final_state(state: str) -> RunState:
    """What a journal says at its end; a word that is not known here is no success."""
    return RunState(state) if state in set(RunState) and not RunState(state).live else RunState.FAILED


def list_runs(root: Path) -> list[RunFolder]:
    """Every run in `root`, the one that was started last first. Raises UsageError where it cannot be read."""
    try:
        paths = list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError.one("runs folder", f"{root} cannot be read: {error.strerror}") from error
    return sorted(
        (RunFolder(path) for path in paths if _is_run_folder(path)), key=lambda run: (-_start_time(run), run.name)
    )


def _is_run_folder(path: Path) -> bool:
    """Another user's run that this one may not look into is passed over; so is a link, which could lead anywhere."""
    return is_file(path / "lock") and not path.is_symlink()


def _start_time(run: RunFolder) -> float:
    """The config is written when a run starts and when it goes on."""
    try:
        return run.config.stat().st_mtime
    except OSError:
        return 0.0


def find_run(root: Path, reference: str) -> RunFolder:
    """The run that a name, a unique beginning of one, a folder or `last` means. Raises UsageError."""
    runs = list_runs(root)
    names = [run.name for run in runs]
    if reference == "last" and runs:
        return runs[0]
    if reference in names:
        return RunFolder(root / reference)
    # Its own name, in its own runs folder, whatever way leads there.
    given = Path(os.path.realpath(reference))
    if _is_run_folder(given):
        return RunFolder(given)
    begun = [name for name in names if name.startswith(reference)]
    if len(begun) == 1:
        return RunFolder(root / begun[0])
    if begun:
        raise UsageError.one(reference, f"could be any of {', '.join(sorted(begun))}; give more of the name")
    if not runs:
        raise UsageError.one(reference, f"there are no runs in {root}; say where they are with --runs-dir")
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    raise UsageError.one(reference, f"no run of that name in {root}; there are {shown}{did_you_mean(reference, names)}")
