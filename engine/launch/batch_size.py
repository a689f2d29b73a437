"""What is known of `data.batch_size` before the ranks start: that of the resumed run, and a default that is too large.

`engine.training.batch_size` searches the largest one, `auto`.
"""

from __future__ import annotations

from dataclasses import replace

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.distributed.node_plan import NodePlan
from engine.training.job import Job

BATCH_SIZE_KEY = "data.batch_size"


def reduced_batch_size(config: Config, train_images: int, plan: NodePlan, world_size: int) -> int | None:
    """Return the largest batch size per device that fills a step, if the default is larger; None if it fits, and for a
    batch size that is set."""
    if "batch_size" in config.data.model_fields_set or not config.data.drop_last:
        return None
    largest = train_images // (world_size * plan.devices_per_rank * config.optim.accumulate)
    return largest if 0 < largest < config.data.numeric_batch_size else None


def with_previous_batch_size(job: Job) -> Job:
    """Return the job of a resumed run with the batch size that was found for it, instead of `auto`."""
    folder = job.folder
    if job.config.data.batch_size != "auto" or not job.resumed or folder is None or not folder.config.exists():
        return job
    # Only read: no code that it names runs.
    size = resolve_config(str(folder.config), trust_code=True).config.data.batch_size
    return replace(job, config=job.config.with_values(data={"batch_size": size}))
