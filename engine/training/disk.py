"""Whether the disk has room for the checkpoints of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from engine.config.optimizer_options import state_copies
from engine.config.schema import Config
from engine.config.training_sections import OptimConfig
from engine.utils.host import Shortage, format_bytes, free_bytes
from engine.utils.text import pluralize

# Beside the newest epochs: the best one, and the one that is being written.
EXTRA_CHECKPOINTS = 2


def disk_shortage(folder: Path, available_bytes: int, file_bytes: int, file_count: int) -> Shortage | None:
    """Return the shortage where `file_count` more files of `file_bytes` each do not fit below `folder`."""
    need = file_bytes * file_count
    if need <= available_bytes:
        return None
    return Shortage(
        f"{folder} has {format_bytes(available_bytes)} free, and the checkpoints can take {format_bytes(need)} "
        f"({pluralize(file_count, 'file')} of {format_bytes(file_bytes)})",
        "make room, keep fewer (checkpoint.keep), or let runs lie elsewhere (--runs-dir)",
    )


def checkpoint_bytes(weight_bytes: int, optim: OptimConfig) -> int:
    """Of a checkpoint with so many bytes of weights, and the optimizer's copies of them."""
    return weight_bytes * (1 + state_copies(optim))


def max_new_checkpoints(config: Config, folder: Path | None = None) -> int:
    """Checkpoints that a run is still to find room for, at most; what lies in `folder` already has its own. Names of
    one file are counted once. While one is written the one before it stays, so there is always one."""
    there: set[int] = set()
    if folder is not None:
        with suppress(OSError):
            there = {path.stat().st_ino for path in folder.glob("*.pt")}
    return max(config.checkpoint.keep + EXTRA_CHECKPOINTS - len(there), 1)


def disk_warnings(config: Config, checkpoint_folder: Path, weight_bytes: int) -> list[str]:
    """Whether the disk is too small for a run's checkpoints, each with so many bytes of weights."""
    size, files = checkpoint_bytes(weight_bytes, config.optim), max_new_checkpoints(config, checkpoint_folder)
    try:
        shortage = disk_shortage(checkpoint_folder.parent, free_bytes(checkpoint_folder), size, files)
    except OSError:
        return []
    return [] if shortage is None else [str(shortage)]
