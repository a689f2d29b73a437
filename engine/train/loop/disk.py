"""Check that the disk has space for the checkpoints of a run. Used by `trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.base.errors import Problem
from engine.base.host import free_bytes
from engine.base.text import pluralize
from engine.base.units import format_bytes
from engine.config.optimizer_options import state_copies
from engine.config.schema import Config
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE

# In addition to the newest `checkpoint.keep`: the best one, and the one being written.
EXTRA_CHECKPOINTS = 2


def max_new_checkpoints(config: Config, folder: Path | None = None) -> int:
    """Return the maximum number of additional checkpoint files that a run needs disk space for.

    Those already in `folder` are subtracted; hard links to one file count once. At least 1, because
    an old checkpoint is deleted only after the new one is saved.
    """
    inodes: set[int] = set()
    if folder is not None:
        with suppress(OSError):
            inodes = {path.stat().st_ino for path in folder.glob("*.pt")}
    return max(config.checkpoint.keep + EXTRA_CHECKPOINTS - len(inodes), 1)


def disk_warnings(config: Config, checkpoint_folder: Path, weight_bytes: int) -> Iterator[Problem]:
    """Yield a warning if the disk is too small for the checkpoints of a run."""
    file_bytes = weight_bytes * (1 + state_copies(config.optim))
    file_count = max_new_checkpoints(config, checkpoint_folder)
    with suppress(OSError):
        if file_bytes * file_count > (available_bytes := free_bytes(checkpoint_folder)):
            reason = (
                f"{checkpoint_folder.parent} has {format_bytes(available_bytes)} free, and the checkpoints can take "
                f"{format_bytes(file_bytes * file_count)} ({pluralize(file_count, 'file')} of "
                f"{format_bytes(file_bytes)})"
            )
            advice = f"free disk space, reduce checkpoint.keep, or {OTHER_RUNS_FOLDER_ADVICE}"
            yield Problem("", reason, advice, code="disk-full")
