"""The compare screen: curves of several runs, readout, and runs that change or vanish."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.events import RunFinished, StepEvent
from engine.runs.journal import to_line
from engine.runs.ownership import Ownership
from support.replace import replace
from support.runs.compared_runs import STEPS_PER_EPOCH, compared_events, make_compared_run
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import append_to_journal, make_run_folder
from support.screen.demo_app import visible_text, wait_until
from support.screen.screen_driver import drive, press, real_app
from tui.screens.app import GputrainApp
from tui.screens.compare import CHART_PANEL, TABLE_PANEL, CompareScreen
from tui.screens.run import RunScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")
SIZE = (120, 34)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    make_compared_run(root, "slow", lr=0.05)
    make_compared_run(root, "fast", lr=0.2)
    return root


async def compare(pilot: Pilot[None], root: Path, names: Sequence[str]) -> CompareScreen:
    app = pilot.app
    assert isinstance(app, GputrainApp)
    app.open_compare([root / name for name in names])
    await pilot.pause()
    screen = app.screen
    assert isinstance(screen, CompareScreen)
    await until_shown(pilot, screen)
    return screen


async def until_shown(pilot: Pilot[None], screen: CompareScreen) -> None:
    """Wait until all that has been read is drawn."""
    poller = screen.compare_poller
    await wait_until(pilot, lambda: poller.caught_up)
    screen._rebuild()
    await wait_until(pilot, lambda: screen._shown == (screen.compare_poller.version, True))
    await pilot.pause()


def test_compare_follows_a_live_run(root: Path) -> None:
    *events, _ = compared_events(epochs=4)
    half = len(events) // 2
    live = make_run_folder(root, "live", *events[:half])
    owner = Ownership(live)

    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "live"])
        steps = screen.data.runs[1].last_x("step")  # type: ignore[union-attr]
        assert "running" in visible_text(pilot, f"#{TABLE_PANEL}")
        append_to_journal(live, "".join(to_line(event) + "\n" for event in events[half:]))
        await wait_until(pilot, lambda: screen.compare_poller.runs[1].curves.last_x("step") > steps)  # type: ignore[union-attr]
        append_to_journal(live, to_line(RunFinished(time=50.0, state="finished")) + "\n")
        owner.release()
        await wait_until(pilot, lambda: not screen.compare_poller.runs[1].is_live)
        await until_shown(pilot, screen)
        assert screen.data.runs[1].last_x("step") == 4 * STEPS_PER_EPOCH  # type: ignore[union-attr]

    drive(real_app(root), act, SIZE)


def test_compare_opens_the_selected_run_and_keeps_one_that_is_deleted(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast"])
        await press(pilot, "down", "enter")
        opened = pilot.app.screen
        assert isinstance(opened, RunScreen) and opened.folder.name == "slow"
        await press(pilot, "escape")
        assert pilot.app.screen is screen
        shutil.rmtree(root / "fast")
        await wait_until(pilot, lambda: screen.compare_poller.runs[1].is_missing)
        await until_shown(pilot, screen)
        assert "fast was deleted" in visible_text(pilot, "#message")
        assert [len(curve.series.x) for curve in screen.active_chart.curves] == [4, 4]

    drive(real_app(root), act, SIZE)


def test_compare_of_runs_without_steps_damaged_journals_and_nan_losses(root: Path) -> None:
    make_run_folder(root, "empty")
    damaged = make_run_folder(root, "damaged", make_run_started())
    damaged.journal.write_bytes(damaged.journal.read_bytes() + b"\0\xff{]\n" * 9)
    nan = [make_run_started(), *(replace(make_epoch(1, math.nan), val_loss=math.nan) for _ in range(2))]
    nan.append(
        StepEvent(time=1.0, step=10, epoch=1, losses=[math.nan] * 10, lr=0.1, images_per_second=1.0, data_wait=0.0)
    )
    make_run_folder(root, "nan", *nan)

    async def act(pilot: Pilot[None]) -> None:
        await compare(pilot, root, ["empty", "damaged", "nan", "slow"])
        assert "config.yaml cannot be read" in visible_text(pilot, "#message")
        await press(pilot, "L", "m", "x", "x", "x", "plus", "tab", "left", "f", "f", "tab")
        assert "◆A○ slow" in visible_text(pilot, f"#{TABLE_PANEL}")
        assert "empty" in visible_text(pilot, f"#{TABLE_PANEL}")

    drive(real_app(root), act, SIZE)


def test_compare_draws_the_curves_of_selected_runs_and_keeps_their_letters(root: Path) -> None:
    make_compared_run(root, "middle", lr=0.1)

    def marks(screen: CompareScreen) -> list[str]:
        return sorted(curve.mark for curve in screen.active_chart.curves)

    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast", "middle"])
        assert marks(screen) == ["A", "B", "C"]
        await press(pilot, "down", "space")
        assert marks(screen) == ["A", "C"] and "2 of 3 runs selected" in visible_text(pilot, f"#{TABLE_PANEL}")
        await press(pilot, "up", "space")
        assert marks(screen) == ["A", "B", "C"]
        await press(pilot, "M")
        assert marks(screen) == [] and "No data yet" in visible_text(pilot, "#compare-chart")

    drive(real_app(root), act, SIZE)


def test_compare_sorts_best_first_and_shows_differences_from_the_baseline(root: Path) -> None:
    def names(pilot: Pilot[None]) -> list[str]:
        lines = visible_text(pilot, f"#{TABLE_PANEL}").splitlines()[2:4]
        return [line.split()[1] for line in lines]

    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, root, ["slow", "fast"])
        assert names(pilot) == ["fast", "slow"]
        # The curves are those of the metric that ranks the runs.
        assert screen.view.charts[CHART_PANEL].title == "val acc"
        await press(pilot, "down", "B")
        assert "slow baseline" in " ".join(visible_text(pilot, f"#{TABLE_PANEL}").split())
        assert "(+0." in visible_text(pilot, f"#{TABLE_PANEL}")
        await press(pilot, "B")
        assert "baseline" not in visible_text(pilot, f"#{TABLE_PANEL}")
        await press(pilot, "o", "down", "enter")
        assert "by optim.lr" in visible_text(pilot, f"#{TABLE_PANEL}") and names(pilot) == ["slow", "fast"]

    drive(real_app(root), act, SIZE)


def test_compare_of_many_runs_selects_the_best_and_scrolls_columns(tmp_path: Path) -> None:
    runs = [f"run-{number}" for number in range(12)]
    for number, name in enumerate(runs):
        make_compared_run(tmp_path, name, lr=0.02 * (number + 1), seed=number % 2, epochs=1)

    async def act(pilot: Pilot[None]) -> None:
        screen = await compare(pilot, tmp_path, runs)
        assert len(screen.active_chart.curves) == 8
        first = visible_text(pilot, f"#{TABLE_PANEL}")
        assert "best val acc" in first and "more →" in first
        await press(pilot, "right", "right")
        after = visible_text(pilot, f"#{TABLE_PANEL}")
        assert "best val acc" not in after.splitlines()[1] and "← 2 more" in after and "run-" in after
        await press(pilot, "e", "down", "enter")
        assert screen.active_chart.border_title == "val acc"

    drive(real_app(tmp_path), act, (80, 24))
