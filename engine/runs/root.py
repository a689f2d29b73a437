"""The folder that contains all runs. Imports little: the shell completes the names of runs through it."""

from __future__ import annotations

import os
from pathlib import Path

from engine.utils.files import expand_user, is_file

# Stands for the newest run on the command line.
LAST_RUN = "last"


def runs_root(override: str | None = None) -> Path:
    """Return the folder that contains all runs: `override`, else $GPUTRAIN_RUNS, else ./runs. Raises UsageError if it
    names an unknown user."""
    return expand_user(override or os.environ.get("GPUTRAIN_RUNS") or "runs").absolute()


def is_run_folder(path: Path) -> bool:
    """Whether the path is a readable run folder. Links do not count, because they could point anywhere."""
    return is_file(path / "lock") and not path.is_symlink()


def is_listed(name: str) -> bool:
    """Whether a folder of this name can be a run of a list. Hidden folders, such as the trash, are none."""
    return not name.startswith(".")
