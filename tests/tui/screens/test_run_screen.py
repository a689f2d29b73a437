"""The screen of one run, driven by key presses on simulated runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.runs.control import consume_requests
from engine.runs.events import RunPaused, StepEvent
from engine.runs.folder import RunFolder
from engine.runs.journal import to_line
from engine.runs.ownership import Ownership
from support.messages import says
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.screen.demo_app import demo_app, four_rank_run, visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, real_app
from tui.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.monitor import MonitorScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")


def test_run_screen_shows_progress_curves_and_log(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        shown = visible_text(pilot)
        assert "● training   epoch 19/30   step 278/469" in shown
        assert "ETA 7m08s" in shown
        assert "train 0." in visible_text(pilot, "#loss")
        assert "val 0.9" in visible_text(pilot, "#accuracy")
        ranks = visible_text(pilot, "#ranks")
        assert "memory GiB" in ranks and "61.2/79.6" in ranks and "power W" in ranks and "612/700" in ranks
        assert "epoch  18   val 0.2469 / 0.9242   train 0.0975" in visible_text(pilot, "#log")

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act, (120, 34))


@pytest.mark.parametrize(("key", "request_name"), [("C", "checkpoint"), ("p", "pause")])
def test_run_screen_writes_control_request(demo_runs_folder: Path, key: str, request_name: str) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, key)

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)
    assert [request.request for request in consume_requests(RunFolder(demo_runs_folder / LIVE_RUN).control)] == [
        request_name
    ]


def test_run_screen_confirms_stop(demo_runs_folder: Path) -> None:
    control = RunFolder(demo_runs_folder / LIVE_RUN).control

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "s", "enter")
        assert not list(consume_requests(control))
        await press(pilot, "s", "down", "enter")

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)
    assert [request.request for request in consume_requests(control)] == ["stop"]


def test_run_screen_sends_no_request_to_finished_run(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "p", "s", "c")
        assert not list(consume_requests(RunFolder(demo_runs_folder / FINISHED_RUN).control))

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_resume_before_first_poll_reports_run_still_loading(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app: Any = pilot.app
        app.resume_run(RunFolder(demo_runs_folder / FINISHED_RUN), None)
        await pilot.pause()
        [toast] = app._notifications
        assert says(toast.message, "not-loaded", FINISHED_RUN)

    drive(demo_app(demo_runs_folder), act)


def test_run_screen_leaving_sends_no_request(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, MonitorScreen)
        await pilot.press("q")

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)
    assert not list(consume_requests(RunFolder(demo_runs_folder / LIVE_RUN).control))


def test_run_screen_exports_chart_as_svg_and_csv(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "m", "e", "tab", "e", "e")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)
    exports = RunFolder(demo_runs_folder / FINISHED_RUN).exports
    names = ["accuracy-2.csv", "accuracy-2.svg", "accuracy.csv", "accuracy.svg", "loss.csv", "loss.svg"]
    assert sorted(path.name for path in exports.iterdir()) == [f"{FINISHED_RUN}-{name}" for name in names]
    rows = (exports / f"{FINISHED_RUN}-loss.csv").read_text().splitlines()
    assert rows[0] == "curve,epoch,value"
    assert sum(row.startswith("train,") for row in rows) == 600
    drawing = (exports / f"{FINISHED_RUN}-loss.svg").read_text()
    assert drawing.startswith("<svg") and drawing.count("<polyline") == 3 and ">val</text>" in drawing


def test_run_screen_export_names_the_files_and_their_folder(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await pilot.press("e")
        await pilot.pause()
        folder = RunFolder(demo_runs_folder / FINISHED_RUN).exports
        toasts = [toast.message for toast in pilot.app._notifications]
        assert toasts == [f"Saved {FINISHED_RUN}-loss.svg and {FINISHED_RUN}-loss.csv in {folder}"]

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_run_screen_exports_after_working_directory_has_gone(
    demo_runs_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(pilot: Pilot[None]) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        os.chdir(gone)
        gone.rmdir()
        await press(pilot, "e")
        assert RunFolder(demo_runs_folder / FINISHED_RUN).exports.is_dir()
        monkeypatch.setattr(RunFolder, "is_own", False)
        await press(pilot, "e")
        toasts = [toast.message for toast in pilot.app._notifications]
        assert says(toasts[1], "not-writable", "the working directory: No such file")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_run_screen_names_axis_scale_and_cursor(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "x", "L", "m", "left")
        assert "step 600  log  smooth 2%" in visible_text(pilot, "#loss")
        await press(pilot, "left", "left")
        assert "step 588" in visible_text(pilot, "#accuracy")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


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
        assert "3 not finite" not in visible_text(pilot) and "2 not finite" in visible_text(pilot, "#loss")
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
        await wait_until(pilot, lambda: screen._poller.latest.folder_missing)
        await wait_until_idle(pilot)
        assert "The run folder was deleted" in visible_text(pilot)
        assert "GPU-1de01de0" in visible_text(pilot, "#ranks") or " 1 " in visible_text(pilot, "#ranks")
        assert "train 0." in visible_text(pilot, "#loss")
        await press(pilot, "d", "s", "e")

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_run_screen_draws_new_events(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs", "a", make_run_started(), make_epoch(1, 0.5))

    async def act(pilot: Pilot[None]) -> None:
        assert "val 0.5" in visible_text(pilot, "#accuracy")
        with folder.journal.open("a") as file:
            file.write(to_line(make_epoch(2, 0.75)) + "\n")
        await wait_until(pilot, lambda: "val 0.75" in visible_text(pilot, "#accuracy"))

    drive(real_app(tmp_path / "runs", run="a"), act)


def test_log_dialog_opens_at_end(demo_runs_folder: Path) -> None:
    log = RunFolder(demo_runs_folder / FINISHED_RUN).log
    log.write_text("".join(f"line {number}\n" for number in range(1, 201)))

    async def act(pilot: Pilot[None]) -> None:
        await wait_until(pilot, lambda: "line 200" in visible_text(pilot, "#log"))
        await press(pilot, "l")
        assert "line 200" in visible_text(pilot) and "line 100" not in visible_text(pilot)

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act)


def test_run_screen_footer_shows_only_keys_that_work(demo_runs_folder: Path) -> None:
    async def live(pilot: Pilot[None]) -> None:
        shown = visible_text(pilot, "Keys")
        assert "s stop" in shown and "p pause" in shown and "u resume" not in shown

    async def ended(pilot: Pilot[None]) -> None:
        shown = visible_text(pilot, "Keys")
        assert "s stop" not in shown and "p pause" not in shown and "C checkpoint" not in shown
        assert "u resume" not in shown, "the demo's run has no checkpoint"

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), live, (200, 60))
    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), ended, (200, 60))


def test_run_screen_footer_offers_resume_of_ended_run_in_small_terminal(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs", "a", make_run_started(), make_epoch(1))
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step-1.pt").write_bytes(b"")

    async def act(pilot: Pilot[None]) -> None:
        assert "u resume" in visible_text(pilot, "Keys")

    drive(real_app(tmp_path / "runs", run="a"), act, (80, 24))


def test_run_screen_shows_only_the_latest_of_many_requests(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "p", "C")
        assert [toast.message for toast in pilot.app._notifications] == [
            "Sent the checkpoint request; the log shows its effect"
        ]

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act)


def test_run_screen_footer_offers_continue_while_paused(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs", "a", make_run_started(), RunPaused(step=7, epoch=1))
    owner = Ownership(folder)

    async def act(pilot: Pilot[None]) -> None:
        assert "p continue" in visible_text(pilot, "Keys")
        assert "paused   epoch 1/3   step 7/10" in visible_text(pilot, "#progress")

    drive(real_app(tmp_path / "runs", run="a"), act)
    owner.release()


def test_every_key_of_the_footer_works(demo_runs_folder: Path) -> None:
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
        assert [chart.id for chart in screen.query("Chart") if chart.display] == ["loss"]
        assert "f all panels" in visible_text(pilot, "Keys")
        await press(pilot, "f")
        for key in ("d", "l", "question_mark", "v"):
            await pilot.press(key)
            await pilot.pause()
            assert pilot.app.screen is not screen
            await pilot.press("escape")
            await pilot.pause()
            assert pilot.app.screen is screen

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (120, 34))


def test_tab_shows_charts_that_share_a_place_in_turn(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        shown = []
        for _ in range(5):
            shown.append([chart.id for chart in screen.query("Chart") if chart.display])
            await press(pilot, "tab")
        assert shown == [["loss"], ["accuracy"], ["lr"], ["grad_norm"], ["grad_norm"]]
        assert screen.focused.id == "loss", "after the ranks, the loss again"
        await press(pilot, "shift+tab")
        assert screen.focused.id == "ranks"

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act, (60, 20))


def test_click_focuses_panel(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        for panel in ("accuracy", "lr", "grad_norm", "ranks", "log", "loss"):
            await pilot.click(f"#{panel}", offset=(5, 3))
            assert pilot.app.screen.focused is not None and pilot.app.screen.focused.id == panel

    drive(demo_app(demo_runs_folder, run=LIVE_RUN), act, (160, 48))


def test_burst_of_keys_reaches_the_chart(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        await pilot.press("x", "left", "left", "left", "L", "tab", "f")
        await wait_until_idle(pilot)
        assert screen.view.cursor == pytest.approx(588)
        assert [chart.id for chart in screen.query("Chart") if chart.display] == ["accuracy"]

    drive(demo_app(demo_runs_folder, run=FINISHED_RUN), act, (160, 48))


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
        await wait_until(pilot, lambda: "line 60" in screen._poller.latest.log)
        await wait_until_idle(pilot)
        assert "line 60" not in visible_text(pilot, "#log")
        await press(pilot, "G")
        assert "line 60" in visible_text(pilot, "#log")

    drive(real_app(tmp_path / "runs", run="a"), act)


def test_run_of_four_ranks_fills_its_panels(tmp_path: Path) -> None:
    owner = four_rank_run(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        for panel in ("loss", "accuracy", "lr", "grad_norm", "ranks", "log"):
            rows = visible_text(pilot, f"#{panel}").splitlines()[1:-1]
            empty = [row for row in rows if not row.strip("│ ")]
            assert len(empty) <= len(rows) / 4, panel

    drive(demo_app(tmp_path / "runs", run="wide-4"), act, (160, 48))
    owner.release()
