"""The owner of a run in this process, without ranks, for the tests of its life and of its wait in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.gpus.allocation import GpuAllocation
from engine.jobs.launch.phases import (
    Held,
    Queued,
    Recording,
    Requested,
    RunListener,
    Unrecorded,
    claim,
    enter_queue,
    grant_allocated,
)
from engine.jobs.launch.preflight import Preflight
from engine.jobs.launch.request import RunRequest, check_dependencies
from engine.jobs.launch.training import begin_training, make_job
from engine.jobs.queue.state import QueueStage
from engine.runs.events import Event, RankFailed, RunFinished, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import from_line
from engine.train.distributed.node_plan import NodePlan
from engine.train.loop.job import Job, RunResult
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder

FAILED = RunResult("failed", RankFailed(time=1.0, rank=0, device="cpu", cause="killed", code="process-killed"))
PREFLIGHT = Preflight(plan=NodePlan(("cpu",), (None,), 1, 1, 0, "gloo"))


class Owner:
    """An owner of a run, by default called `a`, and the events that it shows. `held` releases what it holds."""

    def __init__(self, request: RunRequest) -> None:
        self.shown: list[Event] = []
        self.held = Held()
        self.requested = Requested(request, RunListener(self.shown.append), self.held)
        self.folder = RunFolder(request.runs_dir / "a")

    @classmethod
    def of(
        cls, root: Path, *, dry_run: bool = False, detached: bool = False, trust_owner: bool = False, **sections: Any
    ) -> Owner:
        config = Config.model_validate(sections | {"run": {"name": "a"} | sections.get("run", {})})
        return cls(RunRequest(config, root, "a", dry_run, trust_owner=trust_owner, detached=detached))

    def queue(self) -> Queued:
        request = self.requested.request
        dependencies = check_dependencies(request)
        return enter_queue(claim(self.requested, request.config), QueueStage.WAITING, dependencies)

    def begin(self, preflight: Preflight = PREFLIGHT, allocation: GpuAllocation | None = None) -> Unrecorded:
        return begin_training(grant_allocated(self.requested, allocation or GpuAllocation()), preflight)

    def record(self, preflight: Preflight = PREFLIGHT, allocation: GpuAllocation | None = None) -> Recording:
        run = self.begin(preflight, allocation)
        assert isinstance(run, Recording)
        return run

    def prepare(self, preflight: Preflight = PREFLIGHT) -> Job:
        return make_job(self.begin(preflight), preflight)

    def release(self) -> None:
        self.held.__exit__(None, None, None)

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.shown if isinstance(event, WarningEvent)]

    def recorded(self) -> list[Event]:
        lines = self.folder.journal.read_text().splitlines()
        return [event for line in lines if (event := from_line(line)) is not None]


@contextmanager
def owner(root: Path, **options: Any) -> Iterator[Owner]:
    owned = Owner.of(root, **options)
    with owned.held:
        yield owned


def make_ended_run(root: Path, state: str, epochs: int = 2) -> RunFolder:
    events = [make_run_started(), *(make_epoch(number) for number in range(1, epochs + 1))]
    return make_run_folder(root, "a", *events, RunFinished(state=state))
