"""The list of runs of other programs, driven by keys over real files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.runs.metric_rules import read_rules
from support.screen.demo_app import (
    FrozenHost,
    no_gpu_feed,
    toasts,
    visible_text,
    wait_until,
    wait_until_idle,
)
from support.screen.screen_driver import drive, press, press_in_burst, real_app
from tui.screens.app import GputrainApp
from tui.screens.monitor import MonitorScreen
from tui.screens.run import RunScreen
from tui.screens.run_metrics import MetricsDialog
from tui.screens.runs import RunsScreen
from tui.screens.widgets.lines import Lines

pytestmark = pytest.mark.usefixtures("isolated_folder")
RECORDED = Path(__file__).parents[2] / "recordings" / "foreign"


def make_run(folder: Path, lr: float, *losses: float) -> None:
    folder.mkdir(parents=True)
    (folder / "hparams.yaml").write_text(f"lr: {lr}\n")
    rows = [f"{step},{loss}" for step, loss in enumerate(losses)]
    (folder / "metrics.csv").write_text("\n".join(["step,loss", *rows, ""]))


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """A folder with two runs."""
    make_run(tmp_path / "watched" / "slow", 0.01, 1.0, 0.75)
    make_run(tmp_path / "watched" / "fast", 0.1, 1.0, 0.5)
    os.utime(tmp_path / "watched" / "slow" / "metrics.csv", (1e9, 1e9))
    return tmp_path / "watched"


def app_of(pilot: Pilot[None]) -> GputrainApp:
    assert isinstance(pilot.app, GputrainApp)
    return pilot.app


async def open_list(pilot: Pilot[None], path: Path) -> RunsScreen:
    app_of(pilot).open_watched(RunsScreen(app_of(pilot), [path]))
    await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunsScreen))
    screen = pilot.app.screen
    assert isinstance(screen, RunsScreen)
    await wait_until(pilot, lambda: screen.row_poller.complete)
    await refresh(pilot, screen)
    return screen


async def refresh(pilot: Pilot[None], screen: RunsScreen) -> None:
    """Show what the poller has, with the columns for it."""
    screen.update_content()
    await pilot.app.workers.wait_for_complete()
    await wait_until_idle(pilot)


def names(pilot: Pilot[None]) -> list[str]:
    return [Path(row.key).name for row in pilot.app.screen.query_one("#all-runs", Lines)._rows]


def test_list_shows_filters_and_sorts_values_and_parameters_and_opens_a_run(tmp_path: Path, watched: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await open_list(pilot, watched)
        text = visible_text(pilot, "#all-runs")
        assert names(pilot) == ["fast", "slow"] and "growing" in text and "quiet" in text
        assert "0.5 " in text and "lr" in text.splitlines()[1]
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, RunScreen)
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, RunsScreen)
        await press(pilot, "slash")
        await pilot.press(
            *["l", "r", "less_than_sign", "1", "space", "l", "o", "s", "s", "greater_than_sign", "full_stop", "6"]
        )
        await wait_until(pilot, lambda: names(pilot) == ["slow"])
        await press(pilot, "escape", "o", "G", "k", "enter")
        await refresh(pilot, screen)
        assert names(pilot) == ["slow", "fast"]

    drive(real_app(tmp_path / "runs"), act, (120, 30))


def test_metric_is_hidden_and_renamed_for_the_folder_by_key(
    tmp_path: Path, watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (watched / "fast" / "metrics.csv").unlink()
    (watched / "fast" / "train.log").write_text("".join(f"step {step} loss {step} lr 0.1\n" for step in range(5)))

    async def change(pilot: Pilot[None], screen: RunScreen, *keys: str, names: list[str]) -> None:
        await press(pilot, "i")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, MetricsDialog))
        assert "5 records as: step 0 loss 0 lr 0.1" in visible_text(pilot, "Lines")
        await press(pilot, *keys)
        await wait_until(pilot, lambda: screen.chart_data.names == names)

    async def act(pilot: Pilot[None]) -> None:
        await open_list(pilot, watched)
        await press(pilot, "enter")
        screen = pilot.app.screen
        assert isinstance(screen, RunScreen)
        await change(pilot, screen, "enter", names=["loss", "lr"])
        assert "Plot the others over it" in visible_text(pilot, "Lines")
        await press(pilot, "escape")
        await change(pilot, screen, "j", "enter", names=["loss", "lr"])
        assert "Plot the others over it" not in visible_text(pilot, "Lines")
        await press(pilot, "escape")
        await change(pilot, screen, "j", "enter", "j", "enter", names=["loss"])
        await change(pilot, screen, "enter", "enter", "ctrl+u", "x", "enter", names=["x"])
        assert read_rules(watched).names == (("lr", ""), ("loss", "x"))

    drive(real_app(tmp_path / "runs"), act, (120, 30))


def test_keys_that_would_change_a_run_do_nothing_and_are_not_offered(tmp_path: Path, watched: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await open_list(pilot, watched)
        screen = pilot.app.screen
        await press(pilot, "A", "D", "s", "u", "a")
        assert pilot.app.screen is screen and not toasts(pilot)
        await press(pilot, "l")
        assert "Select a run of gputrain first" in toasts(pilot)[-1]
        shown = {key.title for key in pilot.app.screen.key_table}  # type: ignore[attr-defined]
        assert "compare" in shown and not {"archive", "delete", "stop", "new run"} & shown

    drive(real_app(tmp_path / "runs"), act, (120, 30), notifications=True)


def test_new_run_and_growth_appear_without_a_key(tmp_path: Path, watched: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await open_list(pilot, watched)
        make_run(watched / "late", 0.5, 0.125)
        with (watched / "slow" / "metrics.csv").open("a") as file:
            file.write("2,0.0625\n")
        await wait_until(pilot, lambda: set(names(pilot)) == {"late", "slow", "fast"}, 10.0)
        await wait_until(pilot, lambda: "0.0625" in visible_text(pilot, "#all-runs"), 10.0)

    drive(real_app(tmp_path / "runs"), act, (120, 30))


def test_key_of_the_monitor_leads_back_to_the_list_with_its_marks_and_values(tmp_path: Path, watched: Path) -> None:
    app = GputrainApp(
        tmp_path / "runs",
        first=lambda app: app.open_watched(RunsScreen(app, [watched])),
        gpu_poller=no_gpu_feed(),
        host_poller=FrozenHost(),
    )

    async def act(pilot: Pilot[None]) -> None:
        screen: Any = pilot.app.screen
        await wait_until(pilot, lambda: screen.row_poller.complete)
        await refresh(pilot, screen)
        await press(pilot, "space", "escape")
        assert type(pilot.app.screen) is MonitorScreen and "w watched" in visible_text(pilot, "Keys")
        await press(pilot, "w")
        assert pilot.app.screen is screen and len(screen.row_poller.rows or ()) == 2
        assert names(pilot) == ["fast", "slow"] and "1 selected" in visible_text(pilot)
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, MonitorScreen)

    drive(app, act, (160, 40))


def tree_of(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return modification time, inode and content of everything below a path."""
    return {
        str(entry.relative_to(path)): (
            entry.lstat().st_mtime_ns,
            entry.lstat().st_ino,
            entry.read_bytes() if entry.is_file() else b"",
        )
        for entry in path.rglob("*")
    }


def test_nothing_is_written_below_a_watched_path(tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    shutil.copytree(RECORDED, watched)
    before = tree_of(watched)

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_list(pilot, watched)
        await press(pilot, "space", "space", "D", "A", "c", "enter")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await press(pilot, "escape", "j")
        await refresh(pilot, screen)

    drive(real_app(tmp_path / "runs"), act, (120, 30))
    assert tree_of(watched) == before


def test_keys_that_follow_the_one_that_quits_open_no_dialog(watched: Path, tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await open_list(pilot, watched)
        press_in_burst(pilot, "q", "o")
        await wait_until(pilot, lambda: not pilot.app.is_running)

    drive(real_app(tmp_path / "runs"), act)
