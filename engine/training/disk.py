"""Whether the disk has room for the checkpoints of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from engine.config.optimizer_options import state_copies
from engine.config.schema import Config
from engine.config.training_sections import Optim
from engine.utils.host import Shortage, free_bytes, in_bytes
from engine.utils.text import counted

# Beside the newest epochs: the best one, and the one that is being written.
OTHER_CHECKPOINTS = 2


def disk_space(folder: Path, free: int, checkpoint: int, files: int) -> Shortage | None:
    """Whether so many more `files` of `checkpoint` bytes fit below `folder`."""
    need = checkpoint * files
    if need <= free:
        return None
    return Shortage(
        f"{folder} has {in_bytes(free)} free, and the checkpoints can take {in_bytes(need)} "
        f"({counted(files, 'file')} of {in_bytes(checkpoint)})",
        "make room, keep fewer (checkpoint.keep), or let runs lie elsewhere (--runs-dir)",
    )


def checkpoint_bytes(weights: int, optim: Optim) -> int:
    """Of a checkpoint with so many bytes of weights, and the optimizer's copies of them."""
    return weights * (1 + state_copies(optim))


def checkpoint_files(config: Config, folder: Path | None = None) -> int:
    """Checkpoints that a run is still to find room for, at most; what lies in `folder` already has its own. Names of
    one file are counted once. While one is written the one before it stays, so there is always one."""
    there: set[int] = set()
    if folder is not None:
        with suppress(OSError):
            there = {path.stat().st_ino for path in folder.glob("*.pt")}
    return max(config.checkpoint.keep + OTHER_CHECKPOINTS - len(there), 1)


def disk_warnings(config: Config, checkpoints: Path, weights: int) -> list[str]:
    """Whether the disk is too small for a run's checkpoints, each with so many bytes of weights."""
    size, files = checkpoint_bytes(weights, config.optim), checkpoint_files(config, checkpoints)
    try:
        shortage = disk_space(checkpoints.parent, free_bytes(checkpoints), size, files)
    except OSError:
        return []
    return [] if shortage is None else [str(shortage)]
