"""What of this host can run short while a run trains: shared memory, open files, the disk. Pure functions over numbers,
and thin readers of the system."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import NamedTuple

from engine.config import Config, Optim
from engine.data.source import ImageFormat
from engine.lines import counted
from engine.optimizers import state_copies

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the system's own)
LABEL_BYTES = 8
# A loader process hands over the images of a batch as a file that its receiver keeps open.
FILES_PER_BATCH = 1
# What a rank has open besides: libraries' devices, sockets to other ranks, pipes to its loader processes.
OTHER_FILES = 64
# Beside the newest epochs: the best one, and the one that is being written.
OTHER_CHECKPOINTS = 2
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Shortage(NamedTuple):
    """What there is too little of, and what to do about it."""

    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found}; {self.advice}"


@dataclass(frozen=True)
class Loading:
    """How the ranks of this host load: `workers` loader processes a rank, each with `prefetch` batches ahead."""

    ranks: int
    workers: int
    prefetch: int
    batch_bytes: int

    @classmethod
    def of(cls, config: Config, ranks: int, workers: int, images: ImageFormat, devices_a_rank: int = 1) -> Loading:
        batch = config.data.batch * devices_a_rank * (images.channels * images.size**2 + LABEL_BYTES)
        return cls(ranks, workers, config.data.prefetch, batch)


def shared_memory(loading: Loading, free: int) -> Shortage | None:
    """Batches travel from loader processes to their rank in shared memory; where it is full a process is killed."""
    need = loading.ranks * loading.workers * loading.prefetch * loading.batch_bytes
    if need <= free:
        return None
    product = (
        f"{counted(loading.ranks, 'rank')} x {counted(loading.workers, 'worker')} x {loading.prefetch} "
        f"batches of {in_bytes(loading.batch_bytes)}"
    )
    return Shortage(
        f"{SHARED_MEMORY} has {in_bytes(free)} free, and the loader processes can hold {in_bytes(need)} of batches "
        f"({product})",
        "give fewer data.workers or a smaller data.prefetch, or more shared memory "
        f"(docker run --shm-size={ceil(1.5 * need / 2**30)}g)",
    )


def open_files(loading: Loading, limit: int | None) -> Shortage | None:
    """`limit` is the hard one of a process; None for none."""
    need = FILES_PER_BATCH * loading.workers * loading.prefetch + OTHER_FILES
    if loading.workers == 0 or limit is None or need <= limit:
        return None
    return Shortage(
        f"a process may have {limit} files open, and a rank can need {need} ({FILES_PER_BATCH} for each batch, of "
        f"{counted(loading.workers, 'worker')} x {loading.prefetch} batches, and some {OTHER_FILES} more)",
        "give fewer data.workers or a smaller data.prefetch, or raise the limit (nofile in /etc/security/limits.conf, "
        f"docker run --ulimit nofile={max(65536, need)})",
    )


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


def loading_warnings(
    config: Config, ranks: int, workers: int, images: ImageFormat, devices_a_rank: int = 1
) -> list[str]:
    """What of this host is too little for the loader processes of a run, of which `ranks` are here. To be asked before
    they start: they take what is free."""
    loading = Loading.of(config, ranks, workers, images, devices_a_rank)
    shortages = [open_files(loading, most_open_files())]
    with suppress(OSError):
        shortages.append(shared_memory(loading, free_bytes(SHARED_MEMORY)))
    return [str(shortage) for shortage in shortages if shortage is not None]


def disk_warnings(config: Config, checkpoints: Path, weights: int) -> list[str]:
    """Whether the disk is too small for a run's checkpoints, each with so many bytes of weights."""
    size, files = checkpoint_bytes(weights, config.optim), checkpoint_files(config, checkpoints)
    try:
        shortage = disk_space(checkpoints.parent, free_bytes(checkpoints), size, files)
    except OSError:
        return []
    return [] if shortage is None else [str(shortage)]


def free_bytes(path: Path) -> int:
    """Left for this user on the file system that `path` lies on, or will lie on. Raises OSError."""
    found = os.statvfs(existing(path))
    return found.f_bavail * found.f_frsize


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))


def most_open_files() -> int | None:
    """The limit that `raise_open_files` can raise to; None for none."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def raise_open_files() -> None:
    """Let this process, and those that it will start, have as many files open as the system allows it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def in_bytes(size: float) -> str:
    """In the largest unit that it fills, powers of 1024: 12.8 MiB."""
    power = 0
    while size >= 1024 and power < len(UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.1f}".removesuffix(".0") + f" {UNITS[power]}"
