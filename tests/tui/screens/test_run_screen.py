"""The screen of one run, driven by key presses on simulated runs."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.runs.control import consume_requests
from engine.runs.events import RunFinished, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from engine.runs.ownership import Ownership
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started, make_step
from support.runs.factories import make_run_folder
from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, press_in_burst, real_app
from tui.screens.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.pollers.run import StateReader
from tui.screens.run import RunScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")


def test_request_typed_before_the_state_is_known_waits_for_it(
    demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, is_released, publish = demo_app(demo_runs_folder), threading.Event(), StateReader.publish

    def publish_later(reader: StateReader, problem: str | None, *, is_reading: bool) -> None:
        assert is_released.wait(30)
        publish(reader, problem, is_reading=is_reading)

    monkeypatch.setattr(StateReader, "publish", publish_later)
    monkeypatch.setattr("tui.screens.app.MAX_CONTENT_WAIT_SECONDS", 30.0)

    async def act(pilot: Pilot[None]) -> None:
        app.open_run(str(demo_runs_folder / LIVE_RUN))
        press_in_burst(pilot, "C")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        is_released.set()
        await wait_until_idle(pilot)

    drive(app, act)
    [request] = consume_requests(RunFolder(demo_runs_folder / LIVE_RUN).control)
    assert request.request == "checkpoint"


def test_run_screen_shows_malformed_journal(tmp_path: Path) -> None:
    def step(last: int, losses: list[float]) -> StepEvent:
        return StepEvent(step=last, epoch=1, losses=losses, lr=0.0, images_per_second=0.0, data_wait=0.0)

    nan, inf = float("nan"), float("inf")
    folder = make_run_folder(
        tmp_path / "runs", "odd-[red]", make_run_started(), step(3, [nan, inf, 1e300]), step(2**40, [1.0])
    )
    with folder.journal.open("a") as file:
        file.write('{"type": "step"}\n\x00\xff\n{"type": "epoch", "epoch": null}\n' + to_line(step(4, [0.0]))[:-9])
    folder.log.write_text("\x1b[31mred\x1b[0m [bold]not bold[/]\n")

    async def act(pilot: Pilot[None]) -> None:
        assert "3 not finite" not in visible_text(pilot) and "2 not finite" in visible_text(pilot, "#chart-0")
        assert "red [bold]not bold[/]" in visible_text(pilot, "#log")
        assert "odd-[red]" in visible_text(pilot)
        assert "crashed" in visible_text(pilot)
        await press(pilot, "x", "x", "L", "m", "f", "plus", "plus", "minus", "left", "comma", "0", "d", "escape", "l")
        assert pilot.app.is_running

    drive(real_app(tmp_path / "runs", run="odd-[red]"), act)


def test_run_screen_reports_deleted_run_folder(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shutil.rmtree(demo_runs_folder / FINISHED_RUN)
        screen: Any = pilot.app.screen
        await wait_until(pilot, lambda: screen.poller.latest.folder_missing)
        await wait_until_idle(pilot)
        assert "The run folder was deleted" in visible_text(pilot)
        assert "GPU-1de01de0" in visible_text(pilot, "#ranks") or " 1 " in visible_text(pilot, "#ranks")
        assert "train 0." in visible_text(pilot, "#chart-0")
        await press(pilot, "d", "s")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_keys_of_the_charts_change_their_view(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        await press(pilot, "x", "m", "L", "plus")
        assert (screen.view.axis, screen.view.smoothing, screen.view.log) == ("step", 0.02, True)
        zoomed = screen.view.span
        await press(pilot, "comma")
        assert zoomed is not None and screen.view.end is not None
        await press(pilot, "full_stop", "minus", "0")
        assert screen.view.span is None
        await press(pilot, "left")
        assert screen.view.cursor is not None
        await press(pilot, "0", "f")
        assert [chart.id for chart in screen.query("ChartPanel") if chart.display] == ["chart-0"]
        assert "f all panels" in visible_text(pilot, "Keys")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (120, 34))


def test_tab_shows_charts_that_share_a_place_in_turn(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        shown = []
        for _ in range(5):
            shown.append([chart.id for chart in screen.query("ChartPanel") if chart.display])
            await press(pilot, "tab")
        assert shown == [["chart-0"], ["chart-1"], ["chart-2"], ["chart-3"], ["chart-3"]]
        assert screen.focused.id == "chart-0", "after the ranks, the loss again"
        await press(pilot, "shift+tab")
        assert screen.focused.id == "ranks"

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act, (60, 20))


def test_log_panel_follows_until_scrolled_up(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs", "a", make_run_started(), make_epoch(1))
    folder.log.write_text("".join(f"line {number}\n" for number in range(60)))

    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        await wait_until(pilot, lambda: "line 59" in visible_text(pilot, "#log"))
        screen.query_one("#log").focus()
        await press(pilot, "k", "k")
        with folder.log.open("a") as log:
            log.write("line 60\n")
        await wait_until(pilot, lambda: "line 60" in screen.poller.log)
        await wait_until_idle(pilot)
        assert "line 60" not in visible_text(pilot, "#log")
        await press(pilot, "G")
        assert "line 60" in visible_text(pilot, "#log")

    drive(real_app(tmp_path / "runs", run="a"), act)


@pytest.mark.parametrize(("ends", "train_loss"), [([], "0.9000"), ([RunFinished(state="finished")], "0.5000")])
def test_chart_titles_have_the_numbers_of_lists_and_log(
    tmp_path: Path, ends: list[RunFinished], train_loss: str
) -> None:
    last = replace(make_step(20), losses=[0.1, 0.9], grad_norm=1.25)
    epoch = replace(make_epoch(1, 0.5), train_loss=0.5, step=20)
    folder = make_run_folder(tmp_path / "runs", "a", make_run_started(), make_step(10), last, epoch, *ends)
    owner = None if ends else Ownership(folder)

    async def act(pilot: Pilot[None]) -> None:
        await wait_until_idle(pilot)
        assert f"train {train_loss}" in visible_text(pilot, "#chart-0")
        assert "1.2500" in visible_text(pilot) and (ends or "grad norm 1.25" in visible_text(pilot, "#bottleneck"))

    drive(real_app(tmp_path / "runs", "a"), act, (160, 48))
    if owner is not None:
        owner.release()
