"""What can only be said of a run after a look at this machine: its GPUs, its data, its model. Each look may take a
while, so a thread does it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from engine.catalogue import check_model_name
from engine.config import Config
from engine.data import problems_of_shares
from engine.data.look import DataLook, Images
from engine.data.sampler import Shares
from engine.gpus.readings import Snapshot
from engine.gpus.reservation import all_held
from engine.gpus.selection import devices_of, select
from engine.machine import plan
from engine.problems import Problem, UsageError


@dataclass(frozen=True)
class Checked:
    """Of one config: how many ranks it comes to, its images where they could be counted, and what is wrong."""

    ranks: int = 1
    on_gpus: bool = False
    shares: Shares | None = None
    problems: list[Problem] = field(default_factory=list)


class Checker:
    """Looks at one config after the other; a look at data that is no longer wanted is given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data_look: DataLook | None = None
        self._data_key = ""
        self._images: Images | None = None
        self._data_problems: list[Problem] = []

    def check(self, config: Config, snapshot: Snapshot | None) -> Checked:
        """Waits for what it looks at."""
        problems: list[Problem] = []
        ranks, on_gpus = config.device.ranks, False
        try:
            gpus = select(config.device.gpus, devices_of(snapshot, all_held()) if snapshot is not None else [])
            share = plan(config, gpus)
            ranks, on_gpus = share.ranks, share.on_gpu
        except UsageError as error:
            # That a driver has not answered yet is no fault of what was typed; a GPU that is taken can be waited for.
            if snapshot is not None and not snapshot.pending and not config.device.wait:
                problems += error.problems
        try:
            check_model_name(config.model.name)
        except UsageError as error:
            problems += error.problems
        images = self._count(config)
        problems += self._data_problems
        shares = None
        if images is not None:
            data = config.data
            shares = Shares(images.train, images.val, data.batch_size, 0, ranks, data.drop_last, config.run.seed)
            problems += problems_of_shares(shares)
        return Checked(ranks, on_gpus, shares, problems)

    def _count(self, config: Config) -> Images | None:
        key = f"{config.data.model_dump_json(include=DATA_KEYS)}{config.run.seed}"
        with self._lock:
            if key == self._data_key:
                return self._images
            self.give_up()
            look = self._data_look = DataLook(config)
        images, problems = None, []
        try:
            images = look.wait()
        except UsageError as error:
            problems = error.problems
        with self._lock:
            if look is self._data_look:
                self._images, self._data_problems, self._data_look = images, problems, None
                self._data_key = key if images is not None or problems else ""
        return images

    def give_up(self) -> None:
        if self._data_look is not None:
            self._data_look.give_up()


# What the number of images hangs on.
DATA_KEYS = {
    *("dataset", "path", "download", "val_split", "num_classes", "image_size", "channels", "fake_train", "fake_val"),
}
