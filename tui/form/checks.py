"""What can only be said of a run after a look at this machine: its GPUs, its data, its model. Each look may take a
while, so a thread does it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from engine.config.schema import Config
from engine.data.batching import build_sampler_from_counts, sampler_problems
from engine.data.inspection_process import DataInspection, ImageCounts
from engine.data.sampler import DistributedBatchSampler
from engine.distributed.node_plan import plan_node
from engine.gpus.reservation import read_reservations
from engine.gpus.selection import cuda_devices, select
from engine.gpus.snapshot import Snapshot
from engine.models.catalog import check_model_name
from engine.utils.errors import Problem, UsageError


@dataclass(frozen=True)
class FormCheckResult:
    """Of one config: how many ranks it comes to, its images where they could be counted, and what is wrong."""

    total_ranks: int = 1
    on_gpus: bool = False
    sampler: DistributedBatchSampler | None = None
    problems: list[Problem] = field(default_factory=list)


@dataclass
class DatasetScan:
    """A look at the data of one config, under way or done."""

    key: str
    inspection: DataInspection
    image_counts: ImageCounts | None = None
    problems: list[Problem] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        try:
            self.image_counts = self.inspection.wait()
        except UsageError as error:
            self.problems = error.problems
        self.finished.set()


class FormChecker:
    """Looks at one config after the other; a look at data that is no longer wanted is given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scan: DatasetScan | None = None

    def check(self, config: Config, snapshot: Snapshot | None) -> FormCheckResult:
        """Waits for what it looks at."""
        problems: list[Problem] = []
        ranks, on_gpus = config.device.ranks, False
        try:
            gpus = select(
                config.device.gpus, cuda_devices(snapshot, read_reservations()) if snapshot is not None else []
            )
            share = plan_node(config, gpus)
            # A rank with several GPUs comes to the same as one for each.
            ranks, on_gpus = share.local_world_size * share.devices_per_rank, share.on_gpu
        except UsageError as error:
            # That a driver has not answered yet is no fault of what was typed; a GPU that is taken can be waited for.
            if snapshot is not None and not snapshot.pending and not config.device.wait:
                problems += error.problems
        try:
            check_model_name(config.model)
        except UsageError as error:
            problems += error.problems
        counted = self._scan_for(config)
        problems += counted.problems
        shares = None
        if counted.image_counts is not None:
            shares = build_sampler_from_counts(config, counted.image_counts.train, counted.image_counts.val, ranks)
            problems += sampler_problems(shares) if config.data.batch_size != "auto" else []
        return FormCheckResult(ranks, on_gpus, shares, problems)

    def _scan_for(self, config: Config) -> DatasetScan:
        """Of the look that is under way, or was done, for the same data; of another one where there is none."""
        key = f"{config.data.model_dump_json(include=IMAGE_COUNT_KEYS)}{config.run.seed}"
        with self._lock:
            count = self._scan
            if count is not None and count.key == key:
                mine = False
            else:
                if count is not None:
                    count.inspection.cancel()
                count = self._scan = DatasetScan(key, DataInspection(config))
                mine = True
        if mine:
            count.wait()
        count.finished.wait()
        return count

    def cancel(self) -> None:
        with self._lock:
            if self._scan is not None:
                self._scan.inspection.cancel()


# What the number of images hangs on.
IMAGE_COUNT_KEYS = {
    *("dataset", "path", "download", "val_split", "num_classes", "image_size", "channels", "fake_train", "fake_val"),
}
