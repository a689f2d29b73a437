"""Whether this host has the shared memory, open files and cores that the loader processes need."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from engine.config.schema import Config
from engine.data.sources.base import ImageFormat
from engine.utils.host import Shortage, available_cores, format_bytes, free_bytes, max_open_files
from engine.utils.text import pluralize

SHM_PATH = Path("/dev/shm")  # noqa: S108 (the system's own)


LABEL_BYTES = 8


# A loader process hands over the images of a batch as a file that its receiver keeps open.
OPEN_FILES_PER_BATCH = 1


# What a rank has open besides: libraries' devices, sockets to other ranks, pipes to its loader processes.
BASE_OPEN_FILES = 64


@dataclass(frozen=True)
class LoaderFootprint:
    """How the ranks of this host load: `workers` loader processes a rank, each with `prefetch` batches ahead."""

    local_world_size: int
    workers: int
    prefetch: int
    batch_bytes: int

    @classmethod
    def from_config(
        cls, config: Config, local_world_size: int, workers: int, image_format: ImageFormat, devices_per_rank: int = 1
    ) -> LoaderFootprint:
        batch = (
            config.data.numeric_batch_size
            * devices_per_rank
            * (image_format.channels * image_format.size**2 + LABEL_BYTES)
        )
        return cls(local_world_size, workers, config.data.prefetch, batch)


def shm_shortage(footprint: LoaderFootprint, available_bytes: int) -> Shortage | None:
    """Batches travel from loader processes to their rank in shared memory; where it is full a process is killed."""
    need = footprint.local_world_size * footprint.workers * footprint.prefetch * footprint.batch_bytes
    if need <= available_bytes:
        return None
    product = (
        f"{pluralize(footprint.local_world_size, 'rank')} x {pluralize(footprint.workers, 'worker')} x "
        f"{footprint.prefetch} "
        f"batches of {format_bytes(footprint.batch_bytes)}"
    )
    return Shortage(
        f"{SHM_PATH} has {format_bytes(available_bytes)} free, and the loader processes can hold "
        f"{format_bytes(need)} of batches "
        f"({product})",
        "give fewer data.workers or a smaller data.prefetch, or more shared memory "
        f"(docker run --shm-size={ceil(1.5 * need / 2**30)}g)",
    )


def open_files_shortage(footprint: LoaderFootprint, limit: int | None) -> Shortage | None:
    """`limit` is the hard one of a process; None for none."""
    need = OPEN_FILES_PER_BATCH * footprint.workers * footprint.prefetch + BASE_OPEN_FILES
    if footprint.workers == 0 or limit is None or need <= limit:
        return None
    return Shortage(
        f"a process may have {limit} files open, and a rank can need {need} ({OPEN_FILES_PER_BATCH} for each batch, of "
        f"{pluralize(footprint.workers, 'worker')} x {footprint.prefetch} batches, and some {BASE_OPEN_FILES} more)",
        "give fewer data.workers or a smaller data.prefetch, or raise the limit (nofile in /etc/security/limits.conf, "
        f"docker run --ulimit nofile={max(65536, need)})",
    )


def loader_warnings(
    config: Config, local_world_size: int, workers: int, image_format: ImageFormat, devices_per_rank: int = 1
) -> list[str]:
    """What this host lacks for the loader processes of its `local_world_size` ranks. Call it before they start, because
    they take what is free."""
    loading = LoaderFootprint.from_config(config, local_world_size, workers, image_format, devices_per_rank)
    shortages = [open_files_shortage(loading, max_open_files())]
    with suppress(OSError):
        shortages.append(shm_shortage(loading, free_bytes(SHM_PATH)))
    return [str(shortage) for shortage in shortages if shortage is not None]


MAX_AUTO_WORKERS = 8


def needs_workers(config: Config, *, in_memory: bool) -> bool:
    """Whether making a batch is so much work that loader processes are worth their start: images that are read, or
    distorted one by one."""
    augment = config.augment
    jitter = augment.brightness or augment.contrast or augment.saturation or augment.hue
    return not in_memory or augment.policy != "none" or bool(jitter) or augment.transform is not None


def auto_workers(local_world_size: int, batch_size: int) -> int:
    """The most loader processes that a rank starts of itself; a run measures how many of them it needs."""
    return max(1, min(available_cores() // local_world_size, batch_size, MAX_AUTO_WORKERS))
