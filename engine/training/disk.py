"""Check that the disk has space for the checkpoints of a run. Used by `trainer` and `gputrain doctor`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from engine.config.optimizer_options import state_copies
from engine.config.schema import Config
from engine.config.training_sections import OptimConfig
from engine.runs.folder import OTHER_RUNS_FOLDER_ADVICE
from engine.utils.errors import Problem
from engine.utils.host import free_bytes
from engine.utils.text import pluralize
from engine.utils.units import format_bytes

# In addition to the newest `checkpoint.keep`: the best one, and the one being written.
EXTRA_CHECKPOINTS = 2


def disk_shortage(folder: Path, available_bytes: int, file_bytes: int, file_count: int) -> Problem | None:
    """Return a shortage if `file_count` more files of `file_bytes` each exceed the free space, else None."""
    needed_bytes = file_bytes * file_count
    if needed_bytes <= available_bytes:
        return None
    return Problem(
        "",
        f"{folder} has {format_bytes(available_bytes)} free, and the checkpoints can take "
        f"{format_bytes(needed_bytes)} ({pluralize(file_count, 'file')} of {format_bytes(file_bytes)})",
        f"free disk space, reduce checkpoint.keep, or {OTHER_RUNS_FOLDER_ADVICE}",
        code="disk-full",
    )


def checkpoint_bytes(weight_bytes: int, optim: OptimConfig) -> int:
    """Return the size of a checkpoint: the weights and the optimizer's state for them."""
    return weight_bytes * (1 + state_copies(optim))


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


def disk_warnings(config: Config, checkpoint_folder: Path, weight_bytes: int) -> list[Problem]:
    """Return a warning if the disk is too small for the checkpoints of a run, else nothing."""
    file_bytes = checkpoint_bytes(weight_bytes, config.optim)
    file_count = max_new_checkpoints(config, checkpoint_folder)
    try:
        shortage = disk_shortage(checkpoint_folder.parent, free_bytes(checkpoint_folder), file_bytes, file_count)
    except OSError:
        return []
    return [] if shortage is None else [shortage]
