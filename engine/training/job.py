"""What every rank of a run is told, and how it can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from engine.config.schema import Config
from engine.data.sources.base import ImageSource
from engine.distributed.node_plan import NodePlan
from engine.runs.events import RankFailed
from engine.runs.folder import RunFolder

Outcome = Literal["finished", "stopped"]


class ExitCode(IntEnum):
    """Of a rank, and of `gputrain run --headless`."""

    FINISHED = 0
    FAILED = 1
    USAGE_ERROR = 2
    STOPPED = 3


@dataclass(frozen=True)
class Job:
    """What all ranks of a run are told. Without a folder it is a dry run: one batch forward and back, nothing kept.
    `resumed` says that the folder has a history; `source` is given where it was opened ahead of the ranks."""

    config: Config
    plan: NodePlan
    folder: RunFolder | None
    resumed: bool
    source: ImageSource | None


@dataclass(frozen=True)
class RunResult:
    """How the ranks ended. `failure` is set for state failed, `reason` for state killed."""

    state: Literal["finished", "stopped", "killed", "failed"]
    failure: RankFailed | None = None
    reason: str = ""
