"""A supervisor in this process with forked ranks, and what its ranks do, for the tests of the supervisor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.config.schema import Config
from engine.gpus.allocation import GpuAllocation
from engine.jobs.launch.gpu_usage import GpuUsagePoller
from engine.jobs.launch.phases import Granted, Held, Requested, RunListener, Unrecorded
from engine.jobs.launch.ranks import Ranks
from engine.jobs.launch.request import RunRequest, SettledConfig
from engine.jobs.launch.supervise import Supervisor
from engine.runs.control import ControlRequest, consume_requests
from engine.runs.events import Event, WarningEvent
from engine.runs.folder import RunFolder
from engine.train.distributed.channel import PipeChannel
from engine.train.distributed.node_plan import NodePlan
from engine.train.distributed.watchdog import Phase
from engine.train.loop.job import Job, Outcome, RunResult
from support.runs.forked_ranks import Body, ForkedRanks

PLAN = NodePlan(("cpu", "cpu"), (None, None), 2, 1, 0, "gloo")


@dataclass(frozen=True)
class SupervisedRun(Unrecorded):
    """A run that only collects its events, with a folder for requests. `on_tick` is called by each tick."""

    folder: RunFolder | None
    on_tick: Callable[[], None]

    def keep_alive(self) -> None:
        self.on_tick()

    def requests(self) -> Iterable[ControlRequest]:
        return () if self.folder is None else consume_requests(self.folder.control)


class Supervised:
    """One start of the ranks, and the events that it emits."""

    def __init__(self, *bodies: Body, folder: RunFolder | None = None, watchdog: float = 0.0) -> None:
        config = Config.model_validate({"run": {"watchdog": watchdog}, "device": {"start_method": "fork"}})
        self.events: list[Event] = []
        self._on_tick: Callable[[], None] = lambda: None
        requested = Requested(RunRequest(config, Path(), "a"), RunListener(self.events.append), Held())
        granted = Granted(requested, GpuAllocation(), None, ())
        run = SupervisedRun(granted, SettledConfig(config, config), folder, lambda: self._on_tick())
        self.ranks = ForkedRanks(*bodies)
        child = Ranks(run, Job(config, PLAN, folder, resumed=False, source=None), iter([self.ranks]))
        self.requests, self._supervisor = child.requests, Supervisor(run, child, GpuUsagePoller([]))
        self.signals = self._supervisor.signals

    def run(self, on_tick: Callable[[], None] = lambda: None) -> RunResult:
        self._on_tick = on_tick
        result: RunResult = self._supervisor.run_once()
        return result

    @property
    def messages(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, WarningEvent)]


def finish(channel: PipeChannel) -> Outcome:
    return "finished"


def hang(channel: PipeChannel) -> Outcome:
    channel.enter_phase(3, Phase.FORWARD)
    channel.send(WarningEvent(message="hangs", code="no-effect"))
    time.sleep(100)
    return "finished"


def wait_for_stop(channel: PipeChannel) -> Outcome:
    while not channel.poll_requests().stop:
        time.sleep(0.01)
    return "stopped"


def fail(channel: PipeChannel) -> Outcome:
    raise ValueError("bad image")


def abort(channel: PipeChannel) -> Outcome:
    os.abort()


def cause_of(result: RunResult) -> str:
    assert result.state == "failed"
    assert result.failure is not None
    return f"{result.failure.rank}: {result.failure.cause}"
