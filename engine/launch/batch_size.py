"""`data.batch_size: auto`: how many images a device takes at most, found before a run starts by a helper process,
`engine.launch.batch_size_process`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from engine.config.loader import resolve_config
from engine.config.schema import Config, as_dict
from engine.data.pipelines.in_memory_images import in_memory_bytes
from engine.data.sampler import PARTS
from engine.data.sources.base import ImageSource
from engine.data.sources.formats import model_input_format
from engine.distributed.node_plan import NodePlan, prepare_environment
from engine.runs.folder import RunFolder
from engine.utils.errors import Problem, UsageError
from engine.utils.exits import describe_exit
from engine.utils.helper_process import HelperExitedError, HelperTimeoutError, start_helper
from engine.utils.host import free_memory
from engine.utils.text import pluralize

BATCH_SIZE_KEY = "data.batch_size"
POLL_SECONDS = 0.2
# The process holds the memory of its GPU until it has ended.
RELEASE_SECONDS = 60.0
# Of the memory that is free. The rest is for what a trial does not see: connections to other ranks, fragments.
MAX_MEMORY_SHARE = 0.9
# There is memory on a CPU for batches that nobody would wait for.
MAX_CPU_BATCH_SIZE = 4096
MAX_CPU_STEP_SECONDS = 2.0

BatchSizeLimit = Literal["memory", "data", "time"]


@dataclass(frozen=True)
class BatchSizeResult:
    """The batch size per device, and what limits it."""

    batch_size: int
    limited_by: BatchSizeLimit

    def describe(self, config: Config) -> str:
        one = "GPU" if config.device.parallel == "dp" else "rank"
        why = {
            "memory": f"about the most that fit into {MAX_MEMORY_SHARE:.0%} of the free memory",
            "data": "all that one step an epoch can have; fewer make more steps, and so may learn faster",
            "time": f"more are over {MAX_CPU_BATCH_SIZE}, or take over {MAX_CPU_STEP_SECONDS:g} s a step",
        }[self.limited_by]
        return f"{BATCH_SIZE_KEY} auto: {pluralize(self.batch_size, 'image')} a {one}, {why}"


def with_batch_size(config: Config, batch_size: int) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"batch_size": batch_size})})


def previous_batch_size(folder: RunFolder) -> int | None:
    """The batch size of a run that goes on; None where none was found yet."""
    if not folder.config.exists():
        return None
    size = resolve_config(str(folder.config)).config.data.batch_size
    return None if size == "auto" else size


def find_batch_size(
    config: Config,
    plan: NodePlan,
    world_size: int,
    source: ImageSource | None,
    on_tick: Callable[[], None] = lambda: None,
    memory_bytes: int | None = None,
) -> BatchSizeResult:
    """The most images that each device of a run takes, tried on the first of this host's. Without a `source` the
    process opens it. `memory_bytes` is what a rank on the CPU may take, in bytes: its share of what is free when left
    out. `on_tick` is called again and again meanwhile. Raises UsageError where not one image fits."""
    devices = slice(plan.devices_per_rank)
    question = {
        "config": as_dict(config),
        "plan": asdict(
            replace(plan, devices=plan.devices[devices], parent_uuids=plan.parent_uuids[devices], local_world_size=1)
        ),
        "world_size": world_size,
        "images": None if source is None else image_metadata(config, source),
        "memory": free_memory()[0] // plan.local_world_size if memory_bytes is None else memory_bytes,
    }
    environment = dict(os.environ)
    prepare_environment(plan, environment)
    helper = start_helper("engine.launch.batch_size_process", env={"GLOO_SOCKET_IFNAME": "lo", **environment})
    found: BatchSizeResult | None = None
    try:
        helper.send(question)
        while True:
            on_tick()
            with suppress(HelperTimeoutError):
                answer = helper.receive(POLL_SECONDS)
                if "problems" in answer:
                    raise UsageError([Problem(where, what) for where, what in answer["problems"]])
                found = BatchSizeResult(**answer)
    except HelperExitedError as error:
        # The last answer is the best one.
        if found is None:
            last = error.last_line or describe_exit(error.exit_code or 0)
            raise UsageError.one(BATCH_SIZE_KEY, f"auto could not be found: {last}; give a number") from error
    finally:
        helper.close(RELEASE_SECONDS)
    return found


def image_metadata(config: Config, source: ImageSource) -> dict[str, Any]:
    """What must be known of images to make up some that are like them, how many there are for training, and the bytes
    of all."""
    form = model_input_format(config, source)
    return {
        "format": asdict(form),
        "bytes": in_memory_bytes([source.num_images(part) for part in PARTS], config, source.format, form),
        "classes": len(source.classes),
        "train": source.num_images("train"),
    }
