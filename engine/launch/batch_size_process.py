"""The helper process that finds `data.batch_size: auto`: it builds what a rank would, and trains it on made-up images,
more and more of them at once, until its memory is full."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from engine.config.data_sections import Augment
from engine.config.loader import check
from engine.config.schema import Config
from engine.data.batching import shares_of
from engine.data.pipelines.choose import Choice
from engine.data.pipelines.input_pipeline import Feed
from engine.data.pipelines.memory import OF_GPU
from engine.data.sampler import BatchRequest
from engine.data.sources.base import ImageFormat
from engine.data.sources.builtin import FakeSource
from engine.data.sources.open import open_source
from engine.distributed.channel import DirectChannel, StopFlag
from engine.distributed.failures import cause_of, out_of_memory
from engine.distributed.node_plan import Plan
from engine.distributed.rank_env import Seat
from engine.distributed.watchdog import Beats, Marker
from engine.launch.batch_size import KEY, MOST_ON_CPU, SHARE, STEP_SECONDS, Found, Limit, about, with_batch
from engine.runs.control import Asked
from engine.training.job import Job
from engine.training.loop import train_step
from engine.training.rank_state import Position, Trainer
from engine.training.train import TrainingData, build_trainer
from engine.utils.errors import UsageError
from engine.utils.helper_process import ParentPipe
from engine.utils.host import in_bytes

# The first step makes the optimizer's state, which is there throughout the second.
STEPS = 2
FIXED = Choice("fixed", "one batch is as good as another")
# Of one image BatchNorm can take no statistics where it has come to one pixel.
FIRST = 2

Outcome = Literal["fits", "full", "slow"]


def main(parent: ParentPipe) -> None:
    """Answers with ever better batch sizes, or with what is wrong."""
    question = parent.receive()
    try:
        config, plan = check(question["config"]), Plan(**question["plan"])
        images = question["images"] or about(config, open_source(config))
        most = images["train"] // (question["world_size"] * plan.devices_a_rank * config.optim.accumulate)
        trials = Trials(config, plan, made_up(images), question["memory"], images["bytes"])
        found: Found | None = None
        limit: Limit = "data"
        if most > MOST_ON_CPU and not plan.on_gpu:
            most, limit = MOST_ON_CPU, "time"
        for found in search(trials, max(most, 1), limit):
            parent.send(asdict(found))
        if found is None:
            room = "a GPU's free memory" if plan.on_gpu else f"the {in_bytes(question['memory'])} that a rank may take"
            what = f"auto: not even one image fits into {room}; give another model.name or data.image_size"
            raise UsageError.one(KEY, what if plan.on_gpu else f"{what}, or fewer device.ranks")
    except UsageError as error:
        parent.send({"problems": [[problem.where, problem.what] for problem in error.problems]})
    except Exception as error:
        parent.send({"problems": [[KEY, f"auto could not be found: {cause_of(error)}; give a number"]]})


def search(trial: Callable[[int], Outcome], most: int, limit: Limit) -> Iterator[Found]:
    """Each better answer: twice as many images until they do not fit, then half of what is between, down to multiples
    of 8 and to a sixteenth. `limit` is why there are no more than `most`."""
    fits, full = 0, min(FIRST, most)
    while (outcome := trial(full)) != "full":
        if outcome == "slow":
            yield Found(fits or full, "time")
            return
        fits = full
        if fits == most:
            yield Found(fits, limit)
            return
        yield Found(fits, "memory")
        full = min(2 * fits, most)
    step = max(fits // 16, 8) if fits >= 32 else 1
    while full - fits > step:
        middle = fits + -(-(full - fits) // (2 * step)) * step
        if trial(middle) == "fits":
            fits = middle
            yield Found(fits, "memory")
        else:
            full = middle


def made_up(images: dict[str, Any]) -> FakeSource:
    """Images that are like those of the data, and enough for each class to have one."""
    images_format, classes = ImageFormat(**images["format"]), tuple(map(str, range(images["classes"])))
    return FakeSource(images_format, classes, {"train": max(images["train"], len(classes)), "val": 1}, seed=0)


class Trials:
    """Says of a number of images a device whether a rank can train on so many. A GPU says itself when it is full; of
    the machine's memory, which has no such end, a rank on the CPU is to take no more than a share of `memory` bytes.
    `held` bytes of images may lie on a GPU besides."""

    def __init__(self, config: Config, plan: Plan, source: FakeSource, memory: int, held: int = 0) -> None:
        self._config, self._plan, self._source, self._room = _trial_config(config), plan, source, SHARE * memory
        self._trainer: Trainer | None = None
        self._peaks: dict[int, int] = {}
        if plan.on_gpu and torch.cuda.is_available():
            for place in plan.places(0):
                free, total = torch.cuda.mem_get_info(place)
                taken = held if held <= OF_GPU * free and config.data.pipeline != "stream" else 0
                torch.cuda.set_per_process_memory_fraction((SHARE * free - taken) / total, place)

    def __call__(self, images: int) -> Outcome:
        if self._plan.on_gpu:
            return "full" if self._seconds(images) is None else "fits"
        if self._expected(images) > self._room:
            return "full"
        reset_peak()
        seconds = self._seconds(images)
        self._peaks[images] = peak()
        if seconds is None or self._peaks[images] > self._room:
            return "full"
        return "slow" if seconds > STEP_SECONDS else "fits"

    def _expected(self, images: int) -> float:
        """Bytes that so many images will take, by what the two largest numbers so far took; 0 where that is not known:
        what is not tried cannot bring the machine down."""
        if len(self._peaks) < 2:
            return 0.0
        (some, took_some), (more, took_more) = sorted(self._peaks.items())[-2:]
        return took_more + max(took_more - took_some, 0) * (images - more) / (more - some)

    def _seconds(self, images: int) -> float | None:
        """Of the fastest of some steps; None where there is no memory for one."""
        try:
            self._trainer = self._trainer or self._build()
            return self._train(self._trainer, images)
        except (RuntimeError, MemoryError, ValueError) as error:
            # Where two images are too many, the one that is left may be too few for BatchNorm.
            too_few = isinstance(error, ValueError) and images < FIRST
            if out_of_memory(error) is None and not too_few:
                raise
        # Outside of the clause, for the error holds what was made on the way to it. DDP cannot go on from half a
        # backward, so all is built anew.
        self._trainer = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._plan.on_gpu:
            torch.cuda.empty_cache()
        return None

    def _build(self) -> Trainer:
        """As the only rank of a world."""
        config, plan, source = self._config, self._plan, self._source
        shares = shares_of(config, source, 1, devices_a_rank=plan.devices_a_rank)
        job = Job(config, plan, None, False, source)
        channel = DirectChannel(None, StopFlag(), Asked(), Marker(Beats(1), 0))
        feed = Feed(FIXED, source, config, source.format, ())
        torch.set_num_threads(plan.threads)
        seat, store = Seat(0, 1, 0, 1), dist.HashStore()
        data = TrainingData(source, shares, source.format, feed)
        return build_trainer(job, seat, store, channel, data, None).trainer

    def _train(self, t: Trainer, images: int) -> float:
        """Seconds of the fastest of some steps. Raises torch's errors."""
        last = BatchRequest("train", 1, np.arange(images * self._plan.devices_a_rank))
        step = [replace(last, ends_step=False)] * (self._config.optim.accumulate - 1) + [last]
        feed = Feed(FIXED, self._source, self._config, self._source.format, cycle(step))
        t.batches, t.position = feed.on(t.device), Position()
        seconds = []
        for _ in range(STEPS):
            began = time.perf_counter()
            train_step(t)
            if self._plan.on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds)


def reset_peak() -> None:
    """Let `peak` begin anew, with what was freed given back to the system: proc_pid_clear_refs(5), malloc_trim(3).
    Where that cannot be had the peak is one of before, and the batch found the smaller."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes of memory that this process had at its most."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) << 10 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _trial_config(config: Config) -> Config:
    """The same, but for what costs time and no memory of the device, or needs other ranks; and with a learning rate
    that leaves the weights finite."""
    augment = Augment(mixup=config.augment.mixup, cutmix=config.augment.cutmix)
    changes = {
        "device": {"init_method": "auto"},
        "model": {"sync_bn": False, "weights": None, "compile": False},
        # The second batch of a step is added to what the first one left; a third finds the same.
        "optim": {"lr": 1e-9, "accumulate": min(config.optim.accumulate, 2)},
        "run": {"log_every": 1000},
    }
    update: dict[str, Any] = {name: getattr(config, name).model_copy(update=keys) for name, keys in changes.items()}
    return with_batch(config.model_copy(update=update | {"augment": augment}), FIRST)
