"""The screen of a run that another program recorded: charts, parameters, log, and that it changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.gpus.snapshot import Measurement
from engine.watch.folders import ForeignRun, find_runs
from support.replace import replace
from support.screen.demo_app import (
    FROZEN_NOW,
    FrozenGpuFeed,
    demo_app,
    demo_snapshot,
    no_gpu_feed,
    visible_text,
    wait_until,
    wait_until_idle,
)
from support.screen.screen_driver import Drive, drive, press
from tui.screens.run import RunScreen

RECORDINGS = Path(__file__).parents[2] / "recordings" / "foreign"

APPEND = "import sys; file = open(sys.argv[1], 'a'); print(flush=True); sys.stdin.read()"

pytestmark = pytest.mark.usefixtures("isolated_folder")


def make_run(folder: Path, recording: str) -> ForeignRun:
    """Copy a recording, and return the run in it."""
    shutil.copytree(RECORDINGS / recording, folder)
    [run] = find_runs(folder).runs
    return run


def open_run(
    tmp_path: Path, run: ForeignRun, act: Drive, size: tuple[int, int] = (100, 30), gpus: FrozenGpuFeed | None = None
) -> None:
    """Open the screen of a run, and call `act`."""

    async def open_and_act(pilot: Pilot[None]) -> None:
        pilot.app.open_foreign_run(run)  # type: ignore[attr-defined]
        await wait_until_idle(pilot)
        await act(pilot)

    drive(demo_app(tmp_path / "runs", gpus or no_gpu_feed(), demo=None), open_and_act, size, notifications=True)


def gpus_of(pid: int) -> FrozenGpuFeed:
    """Return a host whose first GPU is used by one process."""
    snapshot = demo_snapshot(FROZEN_NOW)
    first, *others = snapshot.gpus
    [known, *_] = (process for gpu in snapshot.gpus for process in gpu.processes.value or ())
    used = replace(known, pid=pid, run=None, gpu_memory=Measurement(3 << 30, FROZEN_NOW))
    first = replace(first, util=Measurement(42, FROZEN_NOW), processes=Measurement((used,), FROZEN_NOW))
    return FrozenGpuFeed(replace(snapshot, gpus=(first, *others)))


def screen_of(pilot: Pilot[None]) -> RunScreen:
    assert isinstance(pilot.app.screen, RunScreen)
    return pilot.app.screen


def chart_titles(pilot: Pilot[None]) -> list[str]:
    return [chart.title for chart in screen_of(pilot).run_panels.chosen.values() if chart.metrics]


def test_charts_are_chosen_among_those_of_the_metrics(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        first, *others = chart_titles(pilot)
        assert first == "loss"
        await press(pilot, "e", "space", "enter")
        assert chart_titles(pilot) == others

    open_run(tmp_path, make_run(tmp_path / "logs", "trainer"), act)


def test_charts_of_many_metrics_are_paged_with_whole_names(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "many"
    folder.mkdir(parents=True)
    names = [f"a_rather_long_name_of_some_metric_{number:02}" for number in range(15)]
    rows = [{"step": step, **dict.fromkeys(names, 0.123456 * step)} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    [run] = find_runs(folder).runs

    async def act(pilot: Pilot[None]) -> None:
        await wait_until(pilot, lambda: "PgDn more charts" in visible_text(pilot, "Keys"))
        pages = []
        for key, place in (("pagedown", "1-6"), ("pagedown", "7-12"), ("pagedown", "13-15"), ("pageup", "13-15")):
            await wait_until(pilot, lambda place=place: f"charts {place} of 15" in visible_text(pilot, "#title"))
            pages.append(chart_titles(pilot))
            await press(pilot, key)
        assert [*pages[0], *pages[1], *pages[2]] == names
        await wait_until(pilot, lambda: "charts 7-12 of 15" in visible_text(pilot, "#title"))
        await wait_until(pilot, lambda: all(name in visible_text(pilot, "#panels") for name in pages[1]))

    open_run(tmp_path, run, act, (120, 34))


def test_foreign_screen_says_what_is_damaged(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert "is damaged at byte" in visible_text(pilot, "#message")

    run = make_run(tmp_path / "logs", "lightning/tb")
    with run.logs[0].files[0].open("ab") as file:
        file.write(b"\xff" * 64)
    open_run(tmp_path, run, act)


def test_foreign_screen_keeps_the_curves_of_a_deleted_run(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shutil.rmtree(run.folder)
        await wait_until(pilot, lambda: "deleted" in visible_text(pilot, "#message"), seconds=10)
        assert chart_titles(pilot)

    run = make_run(tmp_path / "logs", "keras")
    open_run(tmp_path, run, act)
