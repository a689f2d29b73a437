"""What a rank trains, built alone in a process group of one: to check a config, and to try a batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from engine.config.schema import Config
from engine.data.batching import build_sampler
from engine.data.pipelines.choose import PipelineChoice
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.sources.base import ImageSource
from engine.data.sources.formats import model_input_format
from engine.distributed.channel import Channel
from engine.distributed.node_plan import NodePlan
from engine.distributed.rank_env import RankInfo
from engine.distributed.watchdog import Heartbeats, HeartbeatWriter
from engine.runs.control import RequestCounters
from engine.training.job import Job
from engine.training.rank_state import RankState
from engine.training.train import build_trainer
from engine.utils.process import SignalHandler

FIXED_PIPELINE = PipelineChoice("fixed", "the trial needs only one batch")
# BatchNorm cannot normalize a single image whose feature maps are one pixel large.
MIN_TRIAL_BATCH_SIZE = 2


def trial_config(config: Config, **changes: Mapping[str, Any]) -> Config:
    """Return the config of a single process, not compiled; `changes` are by section."""
    single = config.with_values(device={"init_method": "auto"}, model={"compile": False, "sync_bn": False})
    return single.with_values(**changes)


def build_trial_state(
    config: Config, plan: NodePlan, source: ImageSource, world_size: int = 1, local_rank: int = 0
) -> RankState:
    """Build what a rank of a run trains, DDP's gradient buckets among it, as the only rank of a process group.

    Raises UsageError and torch's errors."""
    image_format = model_input_format(config, source)
    sampler = build_sampler(config, source, world_size, devices_per_rank=plan.devices_per_rank)
    channel = Channel(None, SignalHandler(), RequestCounters(), HeartbeatWriter(Heartbeats(1), 0))
    pipeline = InputPipeline(FIXED_PIPELINE, source, config, image_format, ())
    torch.set_num_threads(plan.threads_per_rank)
    rank_info = RankInfo(0, 1, local_rank, plan.local_world_size)
    job, store = Job(config, plan, None, False, source), dist.HashStore()
    return build_trainer(job, rank_info, store, channel, sampler, pipeline).state
