"""`data.batch_size: auto`: how many images a device takes at most, found before a run starts by a helper process,
`engine.launch.batch_size_process`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from engine.config.loader import resolve
from engine.config.schema import Config, as_dict
from engine.data.pipelines.in_memory_images import PARTS, held_bytes
from engine.data.sources.base import Source
from engine.data.sources.formats import image_format
from engine.distributed.node_plan import Plan, prepare_environment
from engine.runs.folder import RunFolder
from engine.utils.errors import Problem, UsageError
from engine.utils.exits import exit_in_words
from engine.utils.helper_process import HelperExitedError, HelperTimeoutError, start_helper
from engine.utils.host import free_memory
from engine.utils.text import counted

KEY = "data.batch_size"
LOOK_SECONDS = 0.2
# The process holds the memory of its GPU until it has ended.
RELEASE_SECONDS = 60.0
# Of the memory that is free. The rest is for what a trial does not see: connections to other ranks, fragments.
SHARE = 0.9
# There is memory on a CPU for batches that nobody would wait for.
MOST_ON_CPU = 4096
STEP_SECONDS = 2.0

Limit = Literal["memory", "data", "time"]


@dataclass(frozen=True)
class Found:
    """So many `images` a device, and what keeps it from being more."""

    images: int
    limit: Limit

    def in_words(self, config: Config) -> str:
        one = "GPU" if config.device.parallel == "dp" else "rank"
        why = {
            "memory": f"about the most that fit into {SHARE:.0%} of the free memory",
            "data": "all that one step an epoch can have; fewer make more steps, and so may learn faster",
            "time": f"more are over {MOST_ON_CPU}, or take over {STEP_SECONDS:g} s a step",
        }[self.limit]
        return f"{KEY} auto: {counted(self.images, 'image')} a {one}, {why}"


def with_batch(config: Config, images: int) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"batch_size": images})})


def batch_before(folder: RunFolder) -> int | None:
    """The batch size of a run that goes on; None where none was found yet."""
    if not folder.config.exists():
        return None
    size = resolve(str(folder.config)).config.data.batch_size
    return None if size == "auto" else size


def find_batch(
    config: Config,
    plan: Plan,
    world_size: int,
    source: Source | None,
    between: Callable[[], None] = lambda: None,
    memory: int | None = None,
) -> Found:
    """The most images that each device of a run takes, tried on the first of this host's. Without a `source` the
    process opens it. `memory` is what a rank on the CPU may take, in bytes: its share of what is free when left out.
    `between` is called again and again meanwhile. Raises UsageError where not one image fits."""
    devices = slice(plan.devices_a_rank)
    question = {
        "config": as_dict(config),
        "plan": asdict(replace(plan, devices=plan.devices[devices], parents=plan.parents[devices], ranks=1)),
        "world_size": world_size,
        "images": None if source is None else about(config, source),
        "memory": free_memory()[0] // plan.ranks if memory is None else memory,
    }
    environment = dict(os.environ)
    prepare_environment(plan, environment)
    helper = start_helper("engine.launch.batch_size_process", env={"GLOO_SOCKET_IFNAME": "lo", **environment})
    found: Found | None = None
    try:
        helper.send(question)
        while True:
            between()
            with suppress(HelperTimeoutError):
                answer = helper.receive(LOOK_SECONDS)
                if "problems" in answer:
                    raise UsageError([Problem(where, what) for where, what in answer["problems"]])
                found = Found(**answer)
    except HelperExitedError as error:
        # The last answer is the best one.
        if found is None:
            last = error.last_line or exit_in_words(error.exit_code or 0)
            raise UsageError.one(KEY, f"auto could not be found: {last}; give a number") from error
    finally:
        helper.close(RELEASE_SECONDS)
    return found


def about(config: Config, source: Source) -> dict[str, Any]:
    """What must be known of images to make up some that are like them, how many there are for training, and the bytes
    of all."""
    form = image_format(config, source)
    return {
        "format": asdict(form),
        "bytes": held_bytes([source.count(part) for part in PARTS], config, source.format, form),
        "classes": len(source.classes),
        "train": source.count("train"),
    }
