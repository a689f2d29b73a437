"""Check the shared memory and CPU cores of this node against what loader processes and NCCL need.

Called by each rank before it starts its DataLoader workers, and by `gputrain doctor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from engine.config.data_sections import ENCODED_DATASETS
from engine.config.rules import key_of_image_transform
from engine.config.schema import Config
from engine.data.sources.base import ImageFormat
from engine.utils.errors import Problem, UsageError
from engine.utils.units import format_bytes

SHM_PATH = Path("/dev/shm")  # noqa: S108 (a mount point, not a temporary file)


LABEL_BYTES = 8  # one int64 label


# Descriptors of a rank: device files, sockets to other ranks, pipes to its DataLoader workers.
BASE_OPEN_FILES = 64

# Batches that decode threads load at the same time. With two of them no thread idles while the last images of a batch
# are decoded, nor while the batch is sent.
BATCHES_IN_PROGRESS = 2
# Batches whose images the rank still copies to the device while the loader processes load the next ones.
RANK_BATCHES = 2

# Segments of NCCL in /dev/shm per rank: the pool of its proxy thread (ncclProxyOpsPool, src/include/proxy.h), and
# without peer-to-peer access the buffers of four connections (src/transport/shm.cc; NVIDIA/nccl#1518).
NCCL_BYTES_PER_RANK = 33_030_528 + 4 * 9_637_888


def buffers_per_process(prefetch: int) -> int:
    """Return the number of buffers of a loader process of decode threads, one for each batch that exists at a time."""
    return BATCHES_IN_PROGRESS + prefetch + RANK_BATCHES


@dataclass(frozen=True)
class LoaderFootprint:
    """Shared memory of the ranks of a node: batches of `batch_bytes`, and NCCL's segments with `nccl`.

    Each rank has `processes` DataLoader workers, or loader processes of decode threads if `threaded`, with `prefetch`
    complete batches each.
    """

    local_world_size: int
    processes: int
    prefetch: int
    batch_bytes: int
    threaded: bool = False
    nccl: bool = False

    @classmethod
    def from_config(
        cls,
        config: Config,
        local_world_size: int,
        workers: int,
        image_format: ImageFormat,
        devices_per_rank: int = 1,
        *,
        nccl: bool = False,
    ) -> LoaderFootprint:
        """Return the footprint of `local_world_size` ranks that load images and int64 labels with `workers` DataLoader
        workers or decode threads each."""
        batch_bytes = (
            config.data.numeric_batch_size
            * devices_per_rank
            * (
                image_format.channels
                * max(image_format.size, image_format.val_size) ** 2
                * image_format.bytes_per_value
                + LABEL_BYTES
            )
        )
        processes = loader_processes(config, workers)
        return cls(local_world_size, processes, config.data.prefetch, batch_bytes, uses_threads(config), nccl)

    @property
    def batches(self) -> int:
        """The most batches of a rank in shared memory at a time."""
        if self.threaded:
            return self.processes * buffers_per_process(self.prefetch)
        # The rank receives one more while it still has its own.
        return self.processes * self.prefetch + RANK_BATCHES + 1 if self.processes else 0

    @property
    def shm_bytes(self) -> int:
        """The most bytes of all ranks in shared memory at a time."""
        nccl_bytes = NCCL_BYTES_PER_RANK if self.nccl else 0
        return self.local_world_size * (self.batches * self.batch_bytes + nccl_bytes)


def shm_shortage(footprint: LoaderFootprint, available_bytes: int) -> Problem | None:
    """Return a shortage if the batches of all ranks and NCCL exceed the free shared memory.

    A DataLoader worker that writes to a full /dev/shm is killed by SIGBUS. Call it before the workers start.
    """
    needed_bytes = footprint.shm_bytes
    if needed_bytes <= available_bytes:
        return None
    users = [*(["the batches of the loader processes"] if footprint.batches else []), *(["NCCL"] * footprint.nccl)]
    # The number of threads does not change that of the batches.
    keys = "data.prefetch" if footprint.threaded else "data.workers or data.prefetch"
    advice = f"reduce {keys}, or " if footprint.batches else ""
    return Problem(
        "",
        f"{SHM_PATH} has {format_bytes(available_bytes)} free, but {' and '.join(users)} can take "
        f"{format_bytes(needed_bytes)}",
        f"{advice}increase the shared memory (docker run --shm-size={ceil(1.5 * needed_bytes / 2**30)}g)",
        code="shm-full",
    )


def check_open_files(limit: int | None) -> None:
    """Raise UsageError if the hard open-file limit is too low for any rank; None means unlimited."""
    if limit is not None and limit < BASE_OPEN_FILES:
        reason = f"a process may open only {limit} files, but a run needs {BASE_OPEN_FILES}"
        raise UsageError.one("open files", reason, "raise the limit with `ulimit -n 1024`", code="limit-too-low")


# Of the 1.1 ms that a photo of 500x375 takes, about 0.15 ms hold the GIL: 4 threads hold it half of the time.
MAX_THREADS_PER_PROCESS = 4


def uses_threads(config: Config) -> bool:
    """Whether images are loaded by decode threads instead of DataLoader workers (`data.worker_type`).

    auto takes threads for image files that are only decoded, cropped and resized, all of which release the GIL.
    Measured on 2 cores: 2 threads load 0.82 to 1.07 times the images per second of 2 DataLoader workers. Their process
    and the rank have 38 MiB of own memory, not 67 or more. Two processes of one thread each load 1.02 to 1.29 times the
    images of 2 threads: threads wait for the GIL.
    """
    data = config.data
    if data.worker_type != "auto":
        return data.worker_type == "threads"
    return data.dataset in ENCODED_DATASETS and key_of_image_transform(config) is None


def loader_processes(config: Config, workers: int) -> int:
    """Return the number of loader processes per rank for this many DataLoader workers or decode threads."""
    return ceil(workers / MAX_THREADS_PER_PROCESS) if uses_threads(config) else workers


def auto_workers(cores: int, batch_size: int) -> int:
    """Upper bound of workers per rank for `data.workers=auto`: all `cores` of the rank.

    On hosts with 12 to 24 cores a GPU, fewer cannot feed a ResNet-18, or epochs of 160 pixels. See
    `engine.data.pipelines.num_workers`.
    """
    return max(1, min(cores, batch_size))
