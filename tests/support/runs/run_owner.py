"""The owner of a run in this process, without ranks, for the tests of its life and of its wait in the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.config.schema import Config
from engine.launch.lifecycle import TrainingRun
from engine.launch.request import RunRequest
from engine.runs.events import Event, RankFailed, RunFinished, WarningEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import from_line
from engine.training.job import RunResult
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder

FAILED = RunResult("failed", RankFailed(time=1.0, rank=0, device="cpu", cause="killed", code="process-killed"))


class Owner:
    """An owner of the run `a`, and the events that it shows."""

    def __init__(
        self, root: Path, *, dry_run: bool = False, detached: bool = False, trust_owner: bool = False, **sections: Any
    ) -> None:
        self.shown: list[Event] = []
        config = Config.model_validate(sections | {"run": {"name": "a"} | sections.get("run", {})})
        request = RunRequest(config, root, "a", dry_run, trust_owner=trust_owner, detached=detached)
        self.run = TrainingRun(request, self.shown.append)
        self.folder = RunFolder(root / "a")

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.shown if isinstance(event, WarningEvent)]

    def recorded(self) -> list[Event]:
        lines = self.folder.journal.read_text().splitlines()
        return [event for line in lines if (event := from_line(line)) is not None]


@contextmanager
def owner(root: Path, **options: Any) -> Iterator[Owner]:
    owned = Owner(root, **options)
    try:
        yield owned
    finally:
        owned.run.release()


def make_ended_run(root: Path, state: str, epochs: int = 2) -> RunFolder:
    events = [make_run_started(), *(make_epoch(number) for number in range(1, epochs + 1))]
    return make_run_folder(root, "a", *events, RunFinished(state=state))
