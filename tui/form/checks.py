"""What can only be said of a run after a look at this machine: its GPUs, its data, its model. Each look may take a
while, so a thread does it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from engine.config.schema import Config
from engine.data.batching import problems_of_shares, shares_of_counts
from engine.data.inspection_process import DataLook, Images
from engine.data.sampler import Shares
from engine.distributed.node_plan import plan
from engine.gpus.reservation import all_held
from engine.gpus.selection import devices_of, select
from engine.gpus.snapshot import Snapshot
from engine.models.catalog import check_model_name
from engine.utils.errors import Problem, UsageError


@dataclass(frozen=True)
class Checked:
    """Of one config: how many ranks it comes to, its images where they could be counted, and what is wrong."""

    ranks: int = 1
    on_gpus: bool = False
    shares: Shares | None = None
    problems: list[Problem] = field(default_factory=list)


@dataclass
class Count:
    """A look at the data of one config, under way or done."""

    key: str
    look: DataLook
    images: Images | None = None
    problems: list[Problem] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        try:
            self.images = self.look.wait()
        except UsageError as error:
            self.problems = error.problems
        self.done.set()


class Checker:
    """Looks at one config after the other; a look at data that is no longer wanted is given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: Count | None = None

    def check(self, config: Config, snapshot: Snapshot | None) -> Checked:
        """Waits for what it looks at."""
        problems: list[Problem] = []
        ranks, on_gpus = config.device.ranks, False
        try:
            gpus = select(config.device.gpus, devices_of(snapshot, all_held()) if snapshot is not None else [])
            share = plan(config, gpus)
            # A rank with several GPUs comes to the same as one for each.
            ranks, on_gpus = share.ranks * share.devices_a_rank, share.on_gpu
        except UsageError as error:
            # That a driver has not answered yet is no fault of what was typed; a GPU that is taken can be waited for.
            if snapshot is not None and not snapshot.pending and not config.device.wait:
                problems += error.problems
        try:
            check_model_name(config.model)
        except UsageError as error:
            problems += error.problems
        counted = self._images_of(config)
        problems += counted.problems
        shares = None
        if counted.images is not None:
            shares = shares_of_counts(config, counted.images.train, counted.images.val, ranks)
            problems += problems_of_shares(shares) if config.data.batch_size != "auto" else []
        return Checked(ranks, on_gpus, shares, problems)

    def _images_of(self, config: Config) -> Count:
        """Of the look that is under way, or was done, for the same data; of another one where there is none."""
        key = f"{config.data.model_dump_json(include=DATA_KEYS)}{config.run.seed}"
        with self._lock:
            count = self._count
            if count is not None and count.key == key:
                mine = False
            else:
                if count is not None:
                    count.look.give_up()
                count = self._count = Count(key, DataLook(config))
                mine = True
        if mine:
            count.wait()
        count.done.wait()
        return count

    def give_up(self) -> None:
        with self._lock:
            if self._count is not None:
                self._count.look.give_up()


# What the number of images hangs on.
DATA_KEYS = {
    *("dataset", "path", "download", "val_split", "num_classes", "image_size", "channels", "fake_train", "fake_val"),
}
