"""The screen of a run that another program recorded: charts, parameters, log, and that it changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.foreign.folders import ForeignRun, find_runs
from engine.gpus.snapshot import Measurement
from engine.utils.files import state_folder
from support.messages import says
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
from tui.chart_choice import MAX_FOLDERS, FolderCharts, read_chart_choice, save_chart_choice
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


def test_hidden_chart_makes_room_and_is_remembered_for_the_folder(tmp_path: Path) -> None:
    async def hide(pilot: Pilot[None]) -> None:
        titles = chart_titles(pilot)
        assert titles[0] == "loss"
        await press(pilot, "X")
        assert chart_titles(pilot)[: len(titles) - 1] == titles[1:]
        await wait_until(pilot, lambda: read_chart_choice(run.folder).hidden == ("loss",))

    async def show_again(pilot: Pilot[None]) -> None:
        assert "loss" not in chart_titles(pilot)
        await press(pilot, "c", "space", "enter")
        assert chart_titles(pilot)[0] == "loss"
        await wait_until(pilot, lambda: read_chart_choice(run.folder).hidden == ())

    run = make_run(tmp_path / "logs", "trainer")
    open_run(tmp_path, run, hide)
    open_run(tmp_path, run, show_again)


def test_chart_choice_forgets_the_oldest_folders(tmp_path: Path) -> None:
    for number in range(MAX_FOLDERS + 1):
        save_chart_choice(FolderCharts(folder=str(tmp_path / str(number)), charts=("loss",)))
    assert read_chart_choice(tmp_path / "0").charts == ()
    assert (
        read_chart_choice(tmp_path / "1").charts == read_chart_choice(tmp_path / str(MAX_FOLDERS)).charts == ("loss",)
    )


def test_chart_choice_ignores_a_damaged_file(tmp_path: Path) -> None:
    save_chart_choice(FolderCharts(folder=str(tmp_path), charts=("loss",)))
    (state_folder() / "foreign-charts.json").write_bytes(b"\xff{")
    assert read_chart_choice(tmp_path).charts == ()


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


def test_export_is_refused_in_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "e")
        await wait_until(pilot, lambda: bool(pilot.app._notifications))
        [toast] = pilot.app._notifications
        assert says(str(toast.message), "not-supported", "belongs to another program")

    run = make_run(tmp_path / "logs", "keras")
    files = sorted(run.folder.iterdir())
    monkeypatch.chdir(run.folder)
    open_run(tmp_path, run, act)
    assert sorted(run.folder.iterdir()) == files
