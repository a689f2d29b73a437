"""A supervisor in this process with forked ranks, and what its ranks do, for the tests of the supervisor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from engine.config.schema import Config
from engine.distributed.channel import PipeChannel
from engine.distributed.node_plan import NodePlan
from engine.distributed.watchdog import Heartbeat, Heartbeats, Phase
from engine.launch.supervisor import Supervisor
from engine.runs.control import RequestCounters
from engine.runs.events import Event, WarningEvent
from engine.runs.folder import RunFolder
from engine.training.job import Job, Outcome, RunResult
from engine.utils.process import SignalHandler
from support.runs.forked_ranks import Body, ForkedRanks

PLAN = NodePlan(("cpu", "cpu"), (None, None), 2, 1, 0, "gloo")


class Supervised:
    """One start of the ranks, and the events that it emits."""

    def __init__(self, *bodies: Body, folder: RunFolder | None = None, watchdog: float = 0.0) -> None:
        config = Config.model_validate({"run": {"watchdog": watchdog}, "device": {"start_method": "fork"}})
        self.job = Job(config, PLAN, folder, resumed=False, source=None)
        self.ranks, self.signals, self.requests = ForkedRanks(*bodies), SignalHandler(), RequestCounters()
        self.events: list[Event] = []
        self.heartbeats: list[Heartbeat] = []

    def run(self, on_tick: Callable[[], None] = lambda: None) -> RunResult:
        def tick(heartbeats: Heartbeats) -> None:
            self.heartbeats = heartbeats.read()
            on_tick()

        return Supervisor(self.job, self.ranks, self.signals, self.events.append, tick, self.requests).run()

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
