"""Run folders: their layout, how they are found by name, and the state of a run.

`engine.runs.ownership` creates and locks them.
"""

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

# An owner on another host counts as dead after this time without a heartbeat.
HEARTBEAT_TIMEOUT_SECONDS = 30.0
# Sizes that the files of a run folder do not exceed. One of another user may be of any size.
MAX_OWNER_BYTES = 1 << 20
# Two confusion matrices of 1,000 classes take 24 MB, with counts of four digits.
MAX_EVALUATION_BYTES = 48 << 20
OTHER_RUNS_FOLDER_ADVICE = "select another folder with --runs-dir or GPUTRAIN_RUNS"


class RunState(StrEnum):
    """State of a run. CRASHED: it did not end, and no process owns it."""

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
        """Whether a process owns a run in this state."""
        return self in (RunState.STARTING, RunState.RUNNING, RunState.PAUSED, RunState.STOPPING)


def runs_root(override: str | None = None) -> Path:
    """Return the folder that contains all runs: `override`, else $GPUTRAIN_RUNS, else ./runs. Raises UsageError if it
    names an unknown user."""
    return expand_user(override or os.environ.get("GPUTRAIN_RUNS") or "runs").absolute()


def sanitize_run_name(stem: str) -> str:
    """Convert a file name to a valid beginning of a run name: invalid characters become dashes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:80] or "run"


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files in one run folder, and the state of the run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """Resolved config, enough to repeat the run."""
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        """Journal of the run, see `engine.runs.events`."""
        return self.path / "events.jsonl"

    @property
    def summary(self) -> Path:
        """Summary of the run, see `engine.runs.history.RunSummary`."""
        return self.path / "summary.json"

    @property
    def log(self) -> Path:
        """Log lines of the run, and the output of its ranks."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, see `engine.runs.checkpoint_files`."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def control(self) -> Path:
        """Folder of the control requests, see `engine.runs.control`."""
        return self.path / "control"

    @property
    def owner(self) -> Path:
        """Host, process and heartbeat of the owner, see `engine.runs.ownership`."""
        return self.path / "owner.json"

    @property
    def lock(self) -> Path:
        """Lock file that the owner holds; it makes a folder a run folder."""
        return self.path / "lock"

    @property
    def class_indices(self) -> Path:
        """Class names by index, as a JSON object."""
        return self.path / "class_indices.json"

    @property
    def evaluation(self) -> Path:
        """Per-class results of the last and the best epoch; `engine.training.metrics` defines the format."""
        return self.path / "evaluation.json"

    @property
    def skipped_files(self) -> Path:
        """List of the dataset files that are not used; written only if the warning cannot name them all."""
        return self.path / "skipped_files.txt"

    @property
    def resumable(self) -> bool:
        """Whether the run has a checkpoint to resume from."""
        return any(self.checkpoints.glob("*.pt"))

    def history(self) -> History:
        """Return the history of the run from its whole journal."""
        return history_from_events(JournalReader(self.journal).poll())

    def state(self, history: History) -> RunState:
        """Return the state of the run from its journal and its owner."""
        if not self.is_owned():
            return _final_state(history.finished.state) if history.finished else RunState.CRASHED
        if history.started is None or history.finished is not None or history.failures:
            # A failure without a run_finished event means that the ranks are restarting.
            return RunState.STARTING
        if history.stopping:
            return RunState.STOPPING
        return RunState.PAUSED if history.paused else RunState.RUNNING

    def is_owned(self) -> bool:
        """Whether a live process owns the run."""
        owner = read_json(self.owner, MAX_OWNER_BYTES)
        if owner is not None and owner.get("host") != socket.gethostname():
            # Not every network file system shares locks between hosts, so the heartbeat decides.
            # It is null after the run was released.
            heartbeat = owner.get("heartbeat")
            return isinstance(heartbeat, int | float) and time.time() - heartbeat < HEARTBEAT_TIMEOUT_SECONDS
        try:
            return is_locked(self.lock)
        except OSError:
            return False


def _final_state(state: str) -> RunState:
    """Convert the state of a `run_finished` event; an unknown state counts as failed."""
    return RunState(state) if state in set(RunState) and not RunState(state).live else RunState.FAILED


def list_runs(root: Path) -> list[RunFolder]:
    """Return all runs in `root`, latest start first. Raises UsageError if the folder cannot be read."""
    try:
        paths = list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = f"{root} cannot be read: {error.strerror}"
        raise UsageError.one("runs folder", reason, OTHER_RUNS_FOLDER_ADVICE) from error
    return sorted(
        (RunFolder(path) for path in paths if _is_run_folder(path)), key=lambda run: (-_start_time(run), run.name)
    )


def _is_run_folder(path: Path) -> bool:
    """Whether the path is a readable run folder. Links do not count, because they could point anywhere."""
    return is_file(path / "lock") and not path.is_symlink()


def _start_time(run: RunFolder) -> float:
    """Return the start of the latest session: the config is written when a run starts or resumes."""
    try:
        return run.config.stat().st_mtime
    except OSError:
        return 0.0


def find_run(root: Path, reference: str) -> RunFolder:
    """Return the run that a name, a unique prefix of a name, a path or `last` refers to. Raises UsageError if
    there is none or several."""
    runs = list_runs(root)
    names = [run.name for run in runs]
    if reference == "last" and runs:
        return runs[0]
    if reference in names:
        return RunFolder(root / reference)
    # Resolve links, so that the run gets its own name in its own runs folder.
    path = Path(os.path.realpath(reference))
    if _is_run_folder(path):
        return RunFolder(path)
    matches = [name for name in names if name.startswith(reference)]
    if len(matches) == 1:
        return RunFolder(root / matches[0])
    if matches:
        raise UsageError.one(reference, f"matches several runs: {', '.join(sorted(matches))}; type more of the name")
    if not runs:
        raise UsageError.one(reference, f"there are no runs in {root}", OTHER_RUNS_FOLDER_ADVICE)
    shown = ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
    raise UsageError.one(reference, f"no run of this name in {root}, only {shown}{did_you_mean(reference, names)}")
