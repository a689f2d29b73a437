"""The monitor, driven by keys and mouse."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.base.codec import replace
from engine.runs.folder import RunFolder
from engine.runs.labels import change_labels
from support.runs.sweeps import make_finished_trials
from support.screen.demo_app import (
    FROZEN_NOW,
    FrozenGpuFeed,
    demo_app,
    demo_snapshot,
    toasts,
    visible_text,
    wait_until,
    with_first_gpu_idle,
)
from support.screen.queue_rows import make_row
from support.screen.screen_driver import drive, press, return_to_first_screen, type_keys, wait_for_frame
from tui.screens.app import GputrainApp
from tui.screens.compare import CompareScreen
from tui.screens.demo.server import FINISHED_RUN, LIVE_RUN
from tui.screens.gpu import GpuScreen
from tui.screens.monitor import MonitorScreen
from tui.screens.run import RunScreen
from tui.screens.sweep import SweepScreen
from tui.screens.widgets.lines import Lines

pytestmark = pytest.mark.usefixtures("isolated_folder")
WIDE = (160, 48)


def screen_of(pilot: Pilot[None]) -> MonitorScreen:
    assert isinstance(pilot.app.screen, MonitorScreen)
    return pilot.app.screen


def picked(pilot: Pilot[None]) -> list[int]:
    """Return the indices of the picked GPUs."""
    app = pilot.app
    assert isinstance(app, GputrainApp) and app.gpu_poller.snapshot is not None
    return [gpu.index for gpu in app.gpu_poller.snapshot.gpus if gpu.uuid in app.picked_gpu_uuids]


def test_monitor_picked_gpus_fill_form(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "down", "j", "space", "down", "space")
        assert visible_text(pilot, "#gpus").count("◆") == 2
        assert "selected: 2, 3" in visible_text(pilot, "#gpus")
        assert "n run on 2, 3" in visible_text(pilot, "Keys")
        await press(pilot, "n")
        assert "gputrain run digits --gpus 2,3" in visible_text(pilot, "#command")

    drive(demo_app(demo_runs_folder), act)


def test_monitor_click_selects_gpu_under_pointer(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        lines = pilot.app.screen.query_one("#gpus", Lines)
        height = (lines.size.height - 1 - 2) // 6
        # Two free GPUs have one line each.
        for index, y in ((3, 2 * height + 1), (0, height - 1), (7, lines.size.height - 2)):
            # The frame and the header are above the first GPU.
            assert await pilot.click("#gpus", offset=(5, 2 + y))
            assert lines.selected_key == demo_snapshot(FROZEN_NOW).gpus[index].uuid

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_monitor_enter_does_what_footer_says(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        # A GPU, a process of a run, and a run.
        for title, screen in (("enter open GPU", GpuScreen), *[("enter open run", RunScreen)] * 2):
            assert title in visible_text(pilot, "Keys")
            await press(pilot, "enter")
            assert isinstance(pilot.app.screen, screen)
            if isinstance(pilot.app.screen, RunScreen):
                assert pilot.app.screen.folder.name == LIVE_RUN
            await press(pilot, "escape", "tab")

    drive(demo_app(demo_runs_folder), act, (120, 34))


def test_monitor_lists_waiting_run_that_cannot_be_opened(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, GputrainApp)
        app.run_list_poller.close()
        reason = "waits for 2 free GPUs, next in the queue"
        app.run_list_poller.waiting = [make_row("sweep-3", 1, 60, folder="", reason=reason)]
        await press(pilot, "tab", "tab", "home", "down")
        assert "Runs  4, 1 live, 1 waiting" in visible_text(pilot, "#runs")
        assert "◌ sweep-3     waits for 2 free GPUs, next in the queue" in visible_text(pilot, "#runs")
        assert "enter" not in visible_text(pilot, "Keys")
        await press(pilot, "enter")
        screen_of(pilot)
        assert "waits for GPUs" in toasts(pilot)[-1]

    drive(demo_app(demo_runs_folder), act, (120, 34))


CHANGES = {
    "D": f"{LIVE_RUN} is running and cannot be deleted",
    "s": f"Stop {LIVE_RUN}?",
    "l": f"Log of {LIVE_RUN}",
    "A": f"Archive {LIVE_RUN}?",
}


def test_monitor_changes_run_under_the_cursor(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        for key in CHANGES:
            pilot.app.clear_notifications()
            await press(pilot, key)
            assert "Select a run of gputrain first" in toasts(pilot)[-1], key
        assert " stop" not in visible_text(pilot, "Keys")
        await press(pilot, "tab", "tab")
        assert "s stop  p pause" in visible_text(pilot, "Keys")
        for key, shown in CHANGES.items():
            await press(pilot, key)
            assert shown in visible_text(pilot) or shown in toasts(pilot)[-1]
            await return_to_first_screen(pilot)

    drive(demo_app(demo_runs_folder, demo=None), act, WIDE)


def test_monitor_lists_no_archived_runs(demo_runs_folder: Path) -> None:
    def archive(name: str) -> None:
        change_labels(RunFolder(demo_runs_folder / name), lambda labels: replace(labels, archived=True))

    async def act(pilot: Pilot[None]) -> None:
        assert FINISHED_RUN not in visible_text(pilot, "#runs") and "Runs  2" in visible_text(pilot, "#runs")
        for folder in demo_runs_folder.iterdir():
            archive(folder.name)
        await wait_until(pilot, lambda: "All runs are archived" in visible_text(pilot, "#runs"))
        assert "Runs  0" in visible_text(pilot, "#runs")

    archive(FINISHED_RUN)
    drive(demo_app(demo_runs_folder), act, WIDE)


def test_footer_of_the_smallest_monitor_offers_a_script(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert "F2 script" in visible_text(pilot, "Keys")
        await press(pilot, "down", "down", "space", "down", "space")
        assert "n run on 2, 3  F2 script" in visible_text(pilot, "Keys")

    drive(demo_app(demo_runs_folder), act, (60, 20))


def test_monitor_shows_sweep_as_one_row_that_opens_it_and_is_marked_as_its_trials(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    make_finished_trials(runs, name="night")

    async def act(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, GputrainApp)
        pilot.app.screen.query_one("#runs").focus()
        await press(pilot, "home")
        shown = visible_text(pilot, "#runs")
        assert "Runs  9" in shown and "▸night " in shown and "night-00" not in shown
        await press(pilot, "space")
        assert sorted(Path(key).name for key in pilot.app.marked_runs) == [f"night-00{number}" for number in range(9)]
        assert "9 selected" in visible_text(pilot, "#runs") and "▸night " in visible_text(pilot, "#runs")
        assert "c compare" in visible_text(pilot, "Keys")
        await press(pilot, "c")
        assert isinstance(pilot.app.screen, CompareScreen)
        await press(pilot, "escape")
        await type_keys(pilot, *"/-008", "enter")
        assert "1 of 9 match" in visible_text(pilot, "#runs") and "night-008 " in visible_text(pilot, "#runs")
        await press(pilot, "escape")
        assert "enter open sweep" in visible_text(pilot, "Keys")
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, SweepScreen) and pilot.app.screen.folder.name == "night"

    drive(demo_app(runs), act, WIDE)


def test_monitor_without_watched_runs_says_how_to_watch(demo_runs_folder: Path) -> None:
    async def check(pilot: Pilot[None]) -> None:
        await press(pilot, "w")
        [toast] = pilot.app._notifications
        assert "`gputrain watch PATH`" in toast.message

    drive(demo_app(demo_runs_folder), check)


def test_monitor_filter_counts_matches(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await type_keys(pilot, "slash", *"bob")
        processes = visible_text(pilot, "#processes")
        assert "Processes  2 of 5 match 'bob'" in processes
        assert "41204" in processes and "41206" not in processes
        assert "0 of 3 runs match 'bob'" in visible_text(pilot, "#runs")
        await press(pilot, "escape")
        assert "Processes  5" in visible_text(pilot, "#processes")
        await type_keys(pilot, "slash", *"digits", "enter")
        assert "Runs  1 of 3 match 'digits'" in visible_text(pilot, "#runs")

    drive(demo_app(demo_runs_folder), act, (120, 34))


def test_monitor_filter_is_no_markup(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", "left_square_bracket", "slash")
        assert "Processes  0 of 5 match '[/'" in visible_text(pilot, "#processes")

    drive(demo_app(demo_runs_folder), act, (120, 34))


@pytest.mark.usefixtures("all_frames")
def test_monitor_redraws_nothing_if_nothing_changed(demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = FrozenGpuFeed(demo_snapshot(FROZEN_NOW))

    async def act(pilot: Pilot[None]) -> None:
        drawn: list[str] = []
        render_line = Lines.render_line
        monkeypatch.setattr(
            Lines, "render_line", lambda lines, y: drawn.append(lines.id or "") or render_line(lines, y)
        )

        async def update() -> set[str]:
            """Return the panels that an update draws, without the runs, whose ages change by themselves."""
            drawn.clear()
            screen_of(pilot).update_content()
            await wait_for_frame(pilot)
            return set(drawn) - {"runs"}

        for _ in range(3):
            assert await update() == set()
        feed.snapshot = with_first_gpu_idle(feed.snapshot)
        assert "gpus" in await update()

    drive(demo_app(demo_runs_folder, feed), act, WIDE)


def test_monitor_refreshes_less_often_until_it_is_used(demo_runs_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = demo_app(demo_runs_folder)

    async def act(pilot: Pilot[None]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("tui.screens.app.UNATTENDED_SECONDS", 0.0)
            app.adapt_refresh()
        assert (app.refresh_s, app.run_list_poller.min_interval_s, app.gpu_poller.min_interval_s) == (5.0, 5.0, 5.0)
        await press(pilot, "down")
        assert (app.refresh_s, app.run_list_poller.min_interval_s, app.gpu_poller.min_interval_s) == (1.0, 0.0, 0.0)

    drive(app, act)
