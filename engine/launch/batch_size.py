"""Reduce a default of `data.batch_size` that is too large, before the ranks start.

`engine.training.batch_size` searches the largest one, `auto`.
"""

from __future__ import annotations

from engine.config.schema import Config
from engine.distributed.node_plan import NodePlan

BATCH_SIZE_KEY = "data.batch_size"


def reduced_batch_size(config: Config, train_images: int, plan: NodePlan, world_size: int) -> int | None:
    """Return the largest batch size per device that fills a step, if the default is larger; None if it fits, and for a
    batch size that is set."""
    if "batch_size" in config.data.model_fields_set or not config.data.drop_last:
        return None
    largest = train_images // (world_size * plan.devices_per_rank * config.optim.accumulate)
    return largest if 0 < largest < config.data.numeric_batch_size else None
