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


def disk_warnings(config: Config, checkpoint_folder: Path, weight_bytes: int) -> Iterator[Problem]:
    """Yield a warning if the disk is too small for the checkpoints of a run that its folder does not have yet."""
    file_bytes = weight_bytes * (1 + state_copies(config.optim))
    with suppress(OSError):
        # Hard links to one file count once.
        existing = {path.stat().st_ino for path in checkpoint_folder.glob("*.pt")}
        # At least 1, because an old checkpoint is deleted only after the new one is saved.
        file_count = max(config.checkpoint.keep + EXTRA_CHECKPOINTS - len(existing), 1)
        if file_bytes * file_count > (available_bytes := free_bytes(checkpoint_folder)):
            reason = (
                f"{checkpoint_folder.parent} has {format_bytes(available_bytes)} free, and the checkpoints can take "
                f"{format_bytes(file_bytes * file_count)} ({pluralize(file_count, 'file')} of "
                f"{format_bytes(file_bytes)})"
            )
            advice = f"free disk space, reduce checkpoint.keep, or {OTHER_RUNS_FOLDER_ADVICE}"
            yield Problem("", reason, advice, code="disk-full")
