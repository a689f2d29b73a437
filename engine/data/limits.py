"""Whether this host has the shared memory, open files and cores that the loader processes need."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from engine.config.schema import Config
from engine.data.sources.base import ImageFormat
from engine.utils.host import Shortage, cores, free_bytes, in_bytes, most_open_files
from engine.utils.text import counted

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (the system's own)


LABEL_BYTES = 8


# A loader process hands over the images of a batch as a file that its receiver keeps open.
FILES_PER_BATCH = 1


# What a rank has open besides: libraries' devices, sockets to other ranks, pipes to its loader processes.
OTHER_FILES = 64


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


MOST_WORKERS = 8


def wants_workers(config: Config, *, in_memory: bool) -> bool:
    """Whether making a batch is so much work that loader processes are worth their start: images that are read, or
    distorted one by one."""
    augment = config.augment
    jitter = augment.brightness or augment.contrast or augment.saturation or augment.hue
    return not in_memory or augment.policy != "none" or bool(jitter) or augment.transform is not None


def auto_workers(ranks: int, batch_size: int) -> int:
    """The most loader processes that a rank starts of itself; a run measures how many of them it needs."""
    return max(1, min(cores() // ranks, batch_size, MOST_WORKERS))
