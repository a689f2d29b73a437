"""The folder of a sweep, `RUNS/NAME`: its files, its owner, and how it is found by name.

It has no `lock` file, so it is no run; its trials are the runs `NAME-000`, `NAME-001` … beside it. A folder that other
users can change is used only with --trust-owner, as for runs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.config.run_name import MAX_NAME_BYTES as MAX_RUN_BYTES
from engine.config.run_name import MAX_NAME_CHARACTERS as MAX_RUN_CHARACTERS
from engine.config.run_name import normalize_name
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, SWEEP_FILE, TRUST_OWNER_ADVICE, RunFolder
from engine.runs.root import is_run_folder
from engine.runs.trials import BEST_TRIAL_FILE
from engine.utils.errors import UsageError, did_you_mean
from engine.utils.files import is_file
from engine.utils.locks import OwnerLock, is_held
from engine.utils.trust import foreign_reason, is_shared

# Room for the number of a trial in `run.name`.
MAX_NAME_CHARACTERS, MAX_NAME_BYTES = MAX_RUN_CHARACTERS - 10, MAX_RUN_BYTES - 10
# Stands for the sweep with the latest result.
LAST_SWEEP = "last"


@dataclass
class SweepFolder:
    """Paths of the files in the folder of one sweep."""

    path: Path

    def __post_init__(self) -> None:
        self.name = self.path.name
        self.settings = self.path / SWEEP_FILE
        """What the sweep searches and how, see `engine.sweeps.settings`. It makes the folder a sweep."""
        self.command = self.path / "command.json"
        """Command of the trials, with its placeholders, if they are those of a script (`engine.command.spec`)."""
        self.config = self.path / "config.yaml"
        """Resolved config that all trials start from; that of trial 0."""
        self.best = self.path / "best.yaml"
        """Config of the best trial so far: what differs from the defaults. That of a script has none."""
        self.best_trial = self.path / BEST_TRIAL_FILE
        """Name of the best trial so far, for the list of runs (`engine.runs.trials`)."""
        self.journal = self.path / "optuna.jsonl"
        """Optuna's journal of the study, JSON lines."""
        self.log = self.path / "log.txt"
        """What the controller prints."""
        self.lock = self.path / "sweep.lock"
        """Lock file on which the controller holds a write lock, see `engine.utils.locks`."""
        self.private_lock = self.path / ".lock"
        """Lock file that only its user can open, which decides who controls the sweep."""
        self.control = self.path / "control"
        """Folder of the stop requests, in the format of `engine.runs.control`."""

    def trial(self, number: int) -> RunFolder:
        """Return the run folder of a trial."""
        return RunFolder(self.path.with_name(f"{self.name}-{number:03d}"))

    def is_running(self) -> bool:
        """Whether a controller on this host runs the sweep."""
        try:
            return is_held(self.lock, counts_flock=self._counts_flock)
        except OSError:
            return False

    @property
    def _counts_flock(self) -> bool:
        """Whether its controller may hold only an `flock`: on a file system without write locks."""
        return not os.path.lexists(self.private_lock)

    def foreign_reason(self) -> str | None:
        """Return why other users can change the sweep, as a clause that follows its name; None if they cannot."""
        try:
            if (reason := foreign_reason(self.path.lstat(), trust_root=False)) is not None:
                return reason
        except OSError as error:
            return f"cannot be examined: {error.strerror}"
        reasons = ((path, foreign_reason(status)) for path, status in self._entries())
        return next((f"contains {path.name}, which {reason}" for path, reason in reasons if reason is not None), None)

    def require_own(self, *, trust_owner: bool = False) -> None:
        """Raise UsageError if the sweep contains a link, or if other users can change it and they are not trusted."""
        for path, status in self._entries():
            if stat.S_ISLNK(status.st_mode):
                reason = f"this sweep contains the link {path.name}"
                raise UsageError.one(str(self.path), reason, "replace the link by what it leads to", code="is-link")
        if not trust_owner and (problem := self.foreign_reason()) is not None:
            raise UsageError.one(str(self.path), f"this sweep {problem}", TRUST_OWNER_ADVICE, code="foreign-writable")

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        with suppress(OSError):
            for path in sorted(self.path.iterdir()):
                with suppress(FileNotFoundError):
                    yield path, path.lstat()

    def make(self) -> None:
        """Create the folder of a new sweep. Raises UsageError."""
        root = self.path.parent
        with self.writing():
            root.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(0o700 if is_shared(root.stat()) else 0o755)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise UsageError if the folder cannot be written to."""
        try:
            yield
        except OSError as error:
            reason = f"cannot be written to: {error.strerror}"
            raise UsageError.one(str(self.path), reason, OTHER_RUNS_FOLDER_ADVICE, code="not-writable") from error

    @contextmanager
    def controller_lock(self) -> Iterator[None]:
        """Hold the lock of the sweep's controller. Raises UsageError if another process holds it."""
        with self.writing():
            lock = OwnerLock.take(self.lock, self.private_lock, counts_flock=self._counts_flock)
            if lock is not None:
                lock.publish()
        if lock is None:
            advice = f"watch it with `gputrain sweep show {self.name}`, stop it with `gputrain sweep stop {self.name}`"
            raise UsageError.one(self.name, "this sweep is already running", advice, code="already-running")
        try:
            if not lock.has_write_lock:
                # Without it, the `flock` counts.
                self.private_lock.unlink()
            yield
        finally:
            lock.close()


def is_sweep_folder(path: Path) -> bool:
    """Whether the path is a readable sweep folder. Links do not count, because they could point anywhere."""
    return is_file(path / SWEEP_FILE) and not path.is_symlink() and not is_run_folder(path)


def list_sweeps(root: Path) -> list[SweepFolder]:
    """Return all sweeps in `root`, the latest first. Raises UsageError if the folder cannot be read."""
    try:
        sweeps = [SweepFolder(path) for path in root.iterdir() if is_sweep_folder(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = f"{root} cannot be read: {error.strerror}"
        raise UsageError.one("runs folder", reason, OTHER_RUNS_FOLDER_ADVICE, code="not-readable") from error
    return sorted(sweeps, key=lambda sweep: (-_mtime(sweep.journal), sweep.name))


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def find_sweep(root: Path, reference: str, *, trust_owner: bool = False) -> SweepFolder:
    """Return the sweep that a name, a path or `last` refers to.

    Raises UsageError if there is none, or if others can change it and `trust_owner` is not set.
    """
    sweeps, name = list_sweeps(root), normalize_name(reference)
    names = [sweep.name for sweep in sweeps]
    if reference == LAST_SWEEP:
        matches = [sweep for sweep in sweeps if trust_owner or sweep.foreign_reason() is None]
    else:
        # A folder that another program made may have the decomposed form.
        matches = [sweep for sweep in sweeps if normalize_name(sweep.name) == name]
        matches.sort(key=lambda sweep: sweep.name != reference)
        if not matches and reference and is_sweep_folder(Path(os.path.realpath(reference))):
            matches = [SweepFolder(Path(os.path.realpath(reference)))]
    if not matches:
        shown = f"no sweep of this name in {root}" + (f", only {', '.join(names[:8])}" if names else "")
        raise UsageError.one(reference or "NAME", shown + did_you_mean(reference, names), code="not-found")
    matches[0].require_own(trust_owner=trust_owner)
    return matches[0]
