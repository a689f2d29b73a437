"""The job that `engine.jobs.launch` passes to every rank, and the ways in which a run ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config.schema import Config
from engine.runs.events import RankFailed
from engine.runs.folder import RunFolder
from engine.train.data.sources.base import ImageSource
from engine.train.distributed.node_plan import NodePlan
from engine.train.optim.lr_range import LrRange

Outcome = Literal["finished", "stopped"]
# How ranks are started: by gputrain with one of torch's start methods, or by another launcher.
StartMethod = Literal["fork", "spawn", "torchrun", "srun", "ray", "env"]


@dataclass(frozen=True)
class Job:
    """Everything a rank needs to train: config, node plan, run folder and opened dataset.

    `folder` is None in a dry run, which runs forward and backward on one batch and saves nothing. `resumed` means that
    the folder already has a journal. `source` is set if it was opened before the ranks were started. `start_method` is
    known to the ranks only. With `lr_range`, a learning rate range test replaces the training; it has no folder.
    `input_source` says what of the model's input is that of its pretrained weights, `amp_reason` why `precision.amp`
    has its level if it was auto.
    """

    config: Config
    plan: NodePlan
    folder: RunFolder | None
    resumed: bool
    source: ImageSource | None
    start_method: StartMethod | None = None
    lr_range: LrRange | None = None
    input_source: str = ""
    amp_reason: str = ""


@dataclass(frozen=True)
class RunResult:
    """How the run ended. `failure` is set if the state is failed, `reason` if it is killed."""

    state: Literal["finished", "stopped", "killed", "failed"]
    failure: RankFailed | None = None
    reason: str = ""
