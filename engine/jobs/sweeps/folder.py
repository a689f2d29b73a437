"""The folder of a sweep, `RUNS/NAME`: its files, its owner, and how it is found by name.

It has no `lock` file, so it is no run; its trials are the runs `NAME-000`, `NAME-001` … beside it. A folder that other
users can change is used only with --trust-owner, as for runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from engine.base.errors import UsageError, did_you_mean, file_errors
from engine.base.files import find_file_stamp, is_file
from engine.base.locks import OwnerLock, is_held
from engine.base.trust import is_shared
from engine.config.run_name import MAX_NAME_BYTES as MAX_RUN_BYTES
from engine.config.run_name import MAX_NAME_CHARACTERS as MAX_RUN_CHARACTERS
from engine.config.run_name import normalize_name
from engine.runs.batch.job import cancel_job
from engine.runs.control import send_request
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE, SWEEP_FILE, PathOf, RunFolder, paths_in
from engine.runs.root import is_run_folder
from engine.runs.trials import BEST_TRIAL_FILE

# Room for the number of a trial in `run.name`.
MAX_NAME_CHARACTERS, MAX_NAME_BYTES = MAX_RUN_CHARACTERS - 10, MAX_RUN_BYTES - 10
# Stands for the sweep with the latest result.
LAST_SWEEP = "last"


class SweepFolder(RunFolder):
    """Paths of the files in the folder of one sweep. Config, command, log, requests and locks are those of a run."""

    kind: ClassVar[str] = "sweep"
    settings = PathOf(SWEEP_FILE)
    """What the sweep searches and how, see `engine.jobs.sweeps.settings`. It makes the folder a sweep."""
    best = PathOf("best.yaml")
    """Config of the best trial so far: what differs from the defaults. That of a script has none."""
    best_trial = PathOf(BEST_TRIAL_FILE)
    """Name of the best trial so far, for the list of runs (`engine.runs.trials`)."""
    journal = PathOf("optuna.jsonl")
    """Optuna's journal of the study, JSON lines."""
    journal_lock = PathOf(".optuna.lock")
    lock = PathOf("sweep.lock")
    """Lock file on which the controller holds a write lock, see `engine.base.locks`."""

    def trial(self, number: int) -> RunFolder:
        """Return the run folder of a trial."""
        return RunFolder(self.path.with_name(f"{self.name}-{number:03d}"))

    def is_owned(self) -> bool:
        """Whether a controller on this host runs the sweep."""
        try:
            return is_held(self.lock)
        except OSError:
            return False

    def _opened_entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        with suppress(OSError):
            for path in sorted(self.path.iterdir()):
                with suppress(FileNotFoundError):
                    yield path.relative_to(self.path), path.lstat()

    def make(self) -> None:
        """Create the folder of a new sweep. Raises UsageError."""
        root = self.path.parent
        with self.writing():
            root.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(0o700 if is_shared(root.stat()) else 0o755)

    def writing(self) -> AbstractContextManager[None]:
        """Raise UsageError if the folder cannot be written to."""
        return file_errors(str(self.path), "cannot be written to", OTHER_RUNS_FOLDER_ADVICE, code="not-writable")

    @contextmanager
    def controller_lock(self) -> Iterator[None]:
        """Hold the lock of the sweep's controller. Raises UsageError if another process holds it."""
        with self.writing():
            lock = OwnerLock.take(self.lock, self.private_lock)
            if lock is not None:
                lock.publish()
        if lock is None:
            advice = f"watch it with `gputrain sweep show {self.name}`, stop it with `gputrain sweep stop {self.name}`"
            raise UsageError.one(self.name, "this sweep is already running", advice, code="already-running")
        try:
            yield
        finally:
            lock.close()


def stop_sweep(folder: SweepFolder) -> str | None:
    """Ask the controller of a sweep to stop, or cancel its jobs and return that, as `cancel_job`. Raises UsageError."""
    if (cancelled := cancel_job(folder)) is None:
        send_request(folder.control, "stop")
    return cancelled


def is_sweep_folder(path: Path) -> bool:
    """Whether the path is a readable sweep folder. Links do not count, because they could point anywhere."""
    return is_file(path / SWEEP_FILE) and not path.is_symlink() and not is_run_folder(path)


def list_sweeps(root: Path) -> list[SweepFolder]:
    """Return all sweeps in `root`, the latest first. Raises UsageError if the folder cannot be read."""
    sweeps = [SweepFolder(path) for path in paths_in(root) if is_sweep_folder(path)]
    return sorted(sweeps, key=lambda sweep: -(find_file_stamp(sweep.journal) or (0, 0, 0))[2])


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
