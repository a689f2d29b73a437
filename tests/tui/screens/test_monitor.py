"""The monitor, driven by keys and mouse."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.gpus.snapshot import Snapshot
from support.messages import says
from support.replace import replace
from support.runs.sweeps import make_finished_trials
from support.screen.demo_app import (
    FROZEN_NOW,
    FrozenGpuFeed,
    demo_app,
    demo_snapshot,
    no_gpu_feed,
    toasts,
    visible_text,
    wait_until,
    wait_until_idle,
    with_first_gpu_idle,
)
from support.screen.queue_rows import make_row
from support.screen.screen_driver import drive, press, press_in_burst, real_app, wait_for_frame
from tui.app import GputrainApp
from tui.demo.server import LIVE_RUN
from tui.screens.dialogs import ChoiceDialog
from tui.screens.gpu import GpuScreen
from tui.screens.monitor import MonitorScreen
from tui.screens.run import RunScreen
from tui.screens.sweep import SweepScreen
from tui.widgets.lines import Lines

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


def test_monitor_shows_gpus_processes_and_runs(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        for size in ((80, 24), (120, 34), (160, 48)):
            await pilot.resize_terminal(*size)
            await wait_until_idle(pilot)
            gpus = visible_text(pilot, "#gpus")
            assert "GPUs  2 free" in gpus
            assert "no answer for 4 s" in gpus
            assert "slowed: heat" in gpus
            assert "fashion-17 rank 0" in gpus
            assert "61.2/79.6" in gpus
            assert "Processes  5" in visible_text(pilot, "#processes")
            runs = visible_text(pilot, "#runs")
            assert "Runs  3, 1 live" in runs
            assert "62%" in runs and "18/30" in runs and "0.9243  ETA 7m08s" in runs
            assert "DEMO: simulated server" in visible_text(pilot)

    drive(demo_app(demo_runs_folder), act)


def test_monitor_focuses_first_gpu_at_start(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "space")
        assert picked(pilot) == [0]

    drive(demo_app(demo_runs_folder), act)


def test_monitor_picked_gpus_fill_form(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "down", "j", "space", "down", "space")
        assert visible_text(pilot, "#gpus").count("●") == 2
        assert "picked: 2, 3" in visible_text(pilot, "#gpus")
        assert "n new run on 2, 3" in visible_text(pilot, "Keys")
        await press(pilot, "n")
        assert "gputrain run digits --gpus 2,3" in visible_text(pilot, "#command")

    drive(demo_app(demo_runs_folder), act)


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
def test_monitor_space_rebuilds_lines_of_one_gpu(demo_runs_folder: Path, size: tuple[int, int]) -> None:
    async def act(pilot: Pilot[None]) -> None:
        rows = screen_of(pilot).query_one("#gpus", Lines)._rows
        await press(pilot, "down", "space")
        after = screen_of(pilot).query_one("#gpus", Lines)._rows
        assert [new.text is not old.text for old, new in zip(rows, after, strict=True)] == [False, True, *[False] * 6]

    drive(demo_app(demo_runs_folder), act, size)


def test_monitor_keys_in_a_burst_act_in_order(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        press_in_burst(pilot, "down", "down", "space", "down", "space", "G", "k", "space")
        await wait_until_idle(pilot)
        assert picked(pilot) == [2, 3, 6]

    drive(demo_app(demo_runs_folder), act)


def test_monitor_keys_in_a_burst_reach_filter(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        press_in_burst(pilot, "slash", *"dig/", "backspace")
        await wait_until_idle(pilot)
        assert "Runs  1 of 3 match 'dig'" in visible_text(pilot, "#runs")

    drive(demo_app(demo_runs_folder), act)


def test_monitor_tells_who_uses_picked_gpu(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "space")
        assert "shared with fashion-17 rank 0  picked: 0" in visible_text(pilot, "#gpus")
        await press(pilot, "space", "down", "down", "space")
        assert "shared" not in visible_text(pilot, "#gpus")

    drive(demo_app(demo_runs_folder), act)


def test_monitor_pick_in_other_panel_explains_itself(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "tab", "space")
        assert picked(pilot) == []
        assert "Space picks GPUs and marks runs" in toasts(pilot)[0]

    drive(demo_app(demo_runs_folder), act)


def test_monitor_space_marks_runs_for_the_list_of_runs(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, GputrainApp)
        pilot.app.screen.query_one("#runs").focus()
        await press(pilot, "space", "space")
        assert "space mark run" in visible_text(pilot, "Keys")
        assert visible_text(pilot, "#runs").count("◆") == 2 and "2 marked" in visible_text(pilot, "#runs")
        assert toasts(pilot) == [] and picked(pilot) == []
        await press(pilot, "r")
        assert visible_text(pilot, "#all-runs").count("◆") == 2
        await press(pilot, "escape", "up", "space")
        assert len(pilot.app.marked_runs) == 1

    drive(demo_app(demo_runs_folder), act)


@pytest.mark.parametrize("size", [(80, 24), WIDE])
@pytest.mark.parametrize("index", [0, 3, 7])
def test_monitor_click_selects_gpu_under_pointer(demo_runs_folder: Path, size: tuple[int, int], index: int) -> None:
    async def act(pilot: Pilot[None]) -> None:
        lines = pilot.app.screen.query_one("#gpus", Lines)
        height = (lines.size.height - 1) // 8
        for y in range(height):
            await pilot.press("home" if index else "end")
            # The frame and the header are above the first GPU.
            assert await pilot.click("#gpus", offset=(5, 2 + index * height + y))
            snapshot = demo_snapshot(FROZEN_NOW)
            assert lines.selected_key == snapshot.gpus[index].uuid

    drive(demo_app(demo_runs_folder), act, size)


@pytest.mark.parametrize(("panel", "rows", "header"), [("#processes", 6, 1), ("#runs", 3, 0)])
def test_monitor_click_selects_row_under_pointer(demo_runs_folder: Path, panel: str, rows: int, header: int) -> None:
    async def act(pilot: Pilot[None]) -> None:
        lines = pilot.app.screen.query_one(panel, Lines)
        keys = [row.key for row in lines._rows]
        assert len(keys) == rows
        for index in (rows - 1, 0, rows // 2):
            await pilot.click(panel, offset=(5, 1 + header + index))
            assert lines.selected_key == keys[index]

    drive(demo_app(demo_runs_folder), act, WIDE)


@pytest.mark.parametrize(("panel", "screen"), [("#gpus", GpuScreen), ("#runs", RunScreen)])
def test_monitor_double_click_opens_row(demo_runs_folder: Path, panel: str, screen: type) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await pilot.click(panel, offset=(5, 2), times=2)
        await wait_until_idle(pilot)
        assert isinstance(pilot.app.screen, screen)

    drive(demo_app(demo_runs_folder), act, WIDE)


@pytest.mark.parametrize(
    ("keys", "title", "screen"),
    [
        ((), "enter GPU details", GpuScreen),
        (("tab",), "enter open run", RunScreen),
        (("tab", "tab"), "enter open run", RunScreen),
    ],
    ids=["GPU", "process of a run", "run"],
)
def test_monitor_enter_does_what_footer_says(
    demo_runs_folder: Path, keys: tuple[str, ...], title: str, screen: type
) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, *keys)
        assert title in visible_text(pilot, "Keys")
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, screen)
        if isinstance(pilot.app.screen, RunScreen):
            assert pilot.app.screen.folder.name == LIVE_RUN

    drive(demo_app(demo_runs_folder), act, (120, 34))


def test_monitor_enter_on_process_without_metrics_opens_nothing(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "tab", "down", "down")
        assert "enter watch" in visible_text(pilot, "Keys")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: bool(toasts(pilot)))
        screen_of(pilot)
        assert "ctrl+k sends it a signal" in toasts(pilot)[-1]

    drive(demo_app(demo_runs_folder), act)


def test_monitor_footer_shows_commands_of_focused_panel(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert "space pick" in visible_text(pilot, "Keys")
        assert "signal" not in visible_text(pilot, "Keys")
        await press(pilot, "tab")
        assert "space pick" not in visible_text(pilot, "Keys")
        assert "^k signal" in visible_text(pilot, "Keys")

    drive(demo_app(demo_runs_folder), act, (120, 34))


def test_monitor_asks_for_signal_only_with_process_focused(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        for keys in (("ctrl+k",), ("tab", "k")):
            await press(pilot, *keys)
            screen_of(pilot)
        assert "Select a process first" in toasts(pilot)[0]
        await press(pilot, "ctrl+k")
        assert isinstance(pilot.app.screen, ChoiceDialog)

    drive(demo_app(demo_runs_folder, demo=None), act)


def test_monitor_lists_waiting_run_that_cannot_be_opened(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, GputrainApp)
        app.run_list_poller.close()
        reason = "waits for 2 free GPUs, next in the queue"
        app.run_list_poller.waiting = [make_row("sweep-3", 1, 60, folder="", reason=reason)]
        await press(pilot, "tab", "tab", "home")
        assert "Runs  4, 1 live, 1 waiting" in visible_text(pilot, "#runs")
        assert "◌ sweep-3     waits for 2 free GPUs, next in the queue" in visible_text(pilot, "#runs")
        assert "enter" not in visible_text(pilot, "Keys")
        await press(pilot, "enter")
        screen_of(pilot)
        assert "waits for GPUs" in toasts(pilot)[-1]

    drive(demo_app(demo_runs_folder), act, (120, 34))


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
        assert "9 marked" in visible_text(pilot, "#runs") and "◆night " in visible_text(pilot, "#runs")
        await press(pilot, *"/-008", "enter")
        assert "1 of 9 match" in visible_text(pilot, "#runs") and "night-008 " in visible_text(pilot, "#runs")
        await press(pilot, "escape")
        assert "enter open sweep" in visible_text(pilot, "Keys")
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, SweepScreen) and pilot.app.screen.folder.name == "night"

    drive(demo_app(runs), act, WIDE)


def test_monitor_filter_counts_matches(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", *"bob")
        processes = visible_text(pilot, "#processes")
        assert "Processes  2 of 5 match 'bob'" in processes
        assert "41204" in processes and "41206" not in processes
        assert "0 of 3 runs match 'bob'" in visible_text(pilot, "#runs")
        await press(pilot, "escape")
        assert "Processes  5" in visible_text(pilot, "#processes")
        await press(pilot, "slash", *"digits", "enter")
        assert "Runs  1 of 3 match 'digits'" in visible_text(pilot, "#runs")

    drive(demo_app(demo_runs_folder), act, (120, 34))


def test_monitor_filter_with_markup_is_shown_literally(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "slash", "left_square_bracket", "b", "right_square_bracket")
        assert "Runs  0 of 3 match '[b]'" in visible_text(pilot, "#runs")

    drive(demo_app(demo_runs_folder), act, (120, 34))


def test_monitor_zooms_time_axis(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert "-5 min" in visible_text(pilot, "#gpus")
        await press(pilot, "minus")
        assert "-20 min" in visible_text(pilot, "#gpus")
        await press(pilot, "0", *["plus"] * 4)
        assert " s " in visible_text(pilot, "#gpus").splitlines()[1]
        assert toasts(pilot) == ["Shorter times cannot be shown"]

    drive(demo_app(demo_runs_folder), act, WIDE)


def test_monitor_without_gpu_shows_host_and_focuses_runs(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        host = " ".join(visible_text(pilot, "#host").replace("│", " ").split())
        assert says(host, "driver-unavailable", "the CPU")
        assert "cpu 37%" in host and "ram 12.0/64.0 GiB" in host
        assert not pilot.app.screen.query_one("#gpus").display
        assert pilot.app.screen.query_one("#runs").has_focus
        assert "No runs yet; press n to start one" in visible_text(pilot, "#runs")
        assert "space" not in visible_text(pilot, "Keys")

    drive(real_app(tmp_path / "runs"), act)


def test_monitor_without_gpu_lists_ranks_on_cpu(demo_runs_folder: Path) -> None:
    (process,) = demo_snapshot(FROZEN_NOW).gpus[0].processes.value or ()

    async def act(pilot: Pilot[None]) -> None:
        app = pilot.app
        assert isinstance(app, GputrainApp)
        assert "gputrain-tui --demo" in " ".join(visible_text(pilot, "#host").split())
        app.host_poller.ranks = (process, replace(process, pid=41201, rank=1))
        screen_of(pilot).update_content()
        await wait_until_idle(pilot)
        assert "Ranks on the CPU  2" in visible_text(pilot, "#processes")
        assert "fashion-17     1  41201  97%" in visible_text(pilot, "#processes")
        await press(pilot, "shift+tab", "enter")
        assert isinstance(pilot.app.screen, RunScreen)

    drive(demo_app(demo_runs_folder, no_gpu_feed(), demo=None), act, WIDE)


def test_monitor_names_each_gpu_of_mixed_models(demo_runs_folder: Path) -> None:
    def renamed(snapshot: Snapshot) -> Snapshot:
        last = snapshot.gpus[6]
        name = replace(last["name"], value="NVIDIA GeForce RTX 4090")
        gpus = (*snapshot.gpus[:6], replace(last, name=name), snapshot.gpus[7])
        return replace(snapshot, gpus=gpus)

    async def act(pilot: Pilot[None]) -> None:
        assert visible_text(pilot, "#gpus").count("H100 80GB HBM3") == 7
        assert visible_text(pilot, "#gpus").count("RTX 4090") == 1
        assert "8 GPUs" in visible_text(pilot, "#title")

    drive(demo_app(demo_runs_folder, FrozenGpuFeed(renamed(demo_snapshot(FROZEN_NOW)))), act, WIDE)


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
