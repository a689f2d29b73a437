"""The demo of `gputrain-tui --demo`: its recordings, and the simulated server that replays them."""

from __future__ import annotations

import asyncio
import math
import os
import time

import numpy as np
import pytest

from engine.runs.evaluations import read_evaluations
from engine.runs.events import RunFinished, RunStarted
from engine.runs.folder import RunFolder, RunState
from engine.runs.inspection import read_inspection
from engine.train.inference.preview import load_preview
from support.gputrain_command import wait_for
from support.runs.factories import row_of
from tui.cli.open_tui import open_demo
from tui.screens.app import GputrainApp
from tui.screens.demo.hosts import DemoHosts
from tui.screens.demo.server import FINISHED_RUN, LIVE_RUN, DemoServer, recorded, recorded_events
from tui.screens.pollers.host import HostPoller


@pytest.mark.parametrize("name", [LIVE_RUN, FINISHED_RUN])
def test_every_line_of_a_demo_journal_is_an_event(name: str) -> None:
    events = recorded_events(name, 1000.0)
    assert len(events) == len(recorded(f"{name}/events.jsonl").splitlines())
    assert isinstance(events[0], RunStarted) and events[0].time == 1000.0
    assert isinstance(events[-1], RunFinished)


def test_demo_inspection_has_confusion_matrix_and_pictures_of_mistakes() -> None:
    with DemoServer() as server:
        run = RunFolder(server.runs_dir / FINISHED_RUN)
        inspection, best = read_inspection(run), read_evaluations(run.evaluation).best
    assert inspection is not None
    assert inspection.info.stale_reason((best.epoch,)) is None
    counts = np.zeros_like(best.read_counts())
    np.add.at(counts, (inspection.columns["label"], inspection.columns["predicted"]), 1)
    assert (counts == best.read_counts()).all()
    mistakes = inspection.ranked("mistakes")
    assert all(load_preview(run, inspection, image).size == (8, 8) for image in inspection.images(mistakes[:20]))
    assert np.isin(mistakes, inspection.thumbnail_rows).all()


def test_demo_server_shows_a_finished_run_and_continues_a_live_one() -> None:
    with DemoServer() as server:
        finished, live = (RunFolder(server.runs_dir / name) for name in (FINISHED_RUN, LIVE_RUN))
        assert row_of(finished).state == RunState.FINISHED
        wait_for(lambda: row_of(live).state == RunState.RUNNING, "the live run's owner", 10)
        before = row_of(live).record.values.get("step")
        wait_for(lambda: row_of(live).record.values.get("step") > before, "another step", 10)
        assert (row_of(live).record.started_at or math.inf) < time.time()
        for folder in (finished, live):
            assert row_of(folder).record.config and row_of(folder).record.classes


def test_demo_gpus_are_synthetic_and_have_current_time() -> None:
    with DemoServer() as server:
        snapshot = server.gpu_monitor(1.0).read(1.0)
    assert snapshot is not None and snapshot.source.made_up
    assert abs(snapshot.time - time.time()) < 5
    assert [gpu.state for gpu in snapshot.gpus] == [*["ok"] * 7, "stale"]


def test_demo_gpus_have_a_past_until_the_demo_opens() -> None:
    with DemoServer() as server:
        past = list(server.past_gpus())
    assert past[0].time < past[-1].time < time.time()
    assert {gpu.state for gpu in past[0].gpus} == {"ok"}
    assert past[-1].gpus[7].state == "stale"


def test_demo_reads_neither_the_load_nor_the_queue_of_the_real_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.cli.open_tui.require_terminal", lambda *commands: None)
    monkeypatch.setattr("tui.cli.open_tui.exit_after_screen", lambda app: None)
    monkeypatch.setenv("GPUTRAIN_RESERVATIONS", "/reservations/of/the/host")
    # The host is read a moment after the start.
    monkeypatch.setattr("tui.screens.app.HOST_DELAY_SECONDS", 0.01)
    started: list[HostPoller] = []
    monkeypatch.setattr(HostPoller, "start", started.append)

    def run(app: GputrainApp) -> None:
        async def main() -> None:
            async with app.run_test() as pilot:
                await pilot.pause(0.5)
                assert os.environ["GPUTRAIN_RESERVATIONS"].startswith(f"{app.runs_dir.parent}/")

        asyncio.run(main())

    monkeypatch.setattr("tui.cli.open_tui.run_app", run)
    open_demo()
    assert started == []


def test_demo_hosts_have_gpus_that_change_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = DemoHosts("lab1,lab2")
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    first = hosts.readings()
    assert [(reading.name, len(reading.snapshot.gpus)) for reading in first if reading.snapshot] == [
        ("lab1", 4),
        ("lab2", 5),
    ]
    assert hosts.readings() is first
    monkeypatch.setattr(time, "time", lambda: 1001.0)
    assert hosts.readings()[0].snapshot != first[0].snapshot
