"""The folder that contains all runs. Imports little: the shell completes the names of runs through it."""

from __future__ import annotations

import os
from pathlib import Path

from engine.base.files import expand_user, is_file

# Stands for the newest run on the command line.
LAST_RUN = "last"


def runs_root(override: str | None = None) -> Path:
    """Return the folder that contains all runs: `override`, else $GPUTRAIN_RUNS, else ./runs. Raises UsageError if it
    names an unknown user."""
    return expand_user(override or os.environ.get("GPUTRAIN_RUNS") or "runs").absolute()


def is_run_folder(path: Path) -> bool:
    """Whether the path is a readable run folder: the record of a run is in it, or the lock of one that starts.

    A copy or a cleanup may leave out the lock. Links do not count, because they could point
    anywhere."""
    has_lock = is_file(path / "lock")
    if not (has_lock or is_file(path / "summary.json")) or path.is_symlink():
        return False
    return has_lock or _has_record(path)


def _has_record(path: Path) -> bool:
    # Another program may have written a file of this name.
    from engine.runs.folder import RunFolder
    from engine.runs.run_record import read_run_record

    return read_run_record(RunFolder(path)) is not None


def is_listed(name: str) -> bool:
    """Whether a folder of this name can be a run of a list. Hidden folders, such as the trash, are none."""
    return not name.startswith(".")
