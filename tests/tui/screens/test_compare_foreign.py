"""The compare screen of runs that other programs have recorded: their charts, parameters and growth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.foreign.folders import find_runs
from support.runs.compared_runs import make_compared_run
from support.screen.demo_app import visible_text, wait_until
from support.screen.screen_driver import drive, press, real_app
from tui.app import GputrainApp
from tui.pollers.compare import CompareCache, ComparePoller
from tui.screens.compare import CompareScreen
from tui.screens.compare_panels import RUNS_PANEL, TABLE_PANEL
from tui.screens.foreign_run import ForeignRunScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")
SIZE = (120, 40)


def make_logs(folder: Path) -> Path:
    for name, lr in (("first", 0.1), ("second", 0.2)):
        (folder / name).mkdir(parents=True)
        rows = ({"step": step, "val/loss": lr / step, "f1 [red]": step / 20} for step in range(1, 11))
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / name / "hparams.yaml").write_text(f"lr: {lr}")
    return folder


async def open_compare(pilot: Pilot[None], root: Path, own: tuple[Path, ...] = ()) -> CompareScreen:
    app = pilot.app
    assert isinstance(app, GputrainApp)
    app.open_compare([*own, *find_runs(root).runs])
    await pilot.pause()
    screen = app.screen
    assert isinstance(screen, CompareScreen)
    await wait_until(pilot, lambda: screen.compare_poller.caught_up and screen._all_drawn)
    await wait_until(pilot, lambda: not screen._charts_to_draw)
    return screen


def test_compare_of_foreign_runs_shows_their_metrics_and_parameters(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        screen = await open_compare(pilot, make_logs(tmp_path / "logs"))
        assert [row.title for row in screen.view.charts.values() if row.metrics] == ["val loss", "f1 [red]"]
        assert screen.view.axis == "step"
        assert "f1 [red]" in visible_text(pilot)
        table = visible_text(pilot, f"#{TABLE_PANEL}")
        assert "1 parameter differs" in table and "0.2" in table
        await press(pilot, "c", "down", "space", "enter")
        await wait_until(pilot, lambda: pilot.app.screen is screen)
        assert [row.title for row in screen.view.charts.values() if row.metrics] == ["val loss"]

    drive(real_app(tmp_path / "runs"), act, SIZE)


def test_large_foreign_run_is_published_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tui.pollers.compare.PART_SECONDS", 0.0)
    (tmp_path / "metrics.csv").write_text("step,loss\n" + "".join(f"{step},0.5\n" for step in range(150_000)))
    poller = ComparePoller(find_runs(tmp_path).runs, CompareCache())
    read = []

    def publish(described: bool) -> None:
        read.append(poller._followers[0].state.curves)

    monkeypatch.setattr(poller, "_publish", publish)
    poller.poll()
    steps = [curves.last_x("step") for curves in read if curves is not None]
    assert len(steps) > 2 and steps == sorted(steps) and steps[-1] == 149_999


def test_compare_follows_a_foreign_run_beside_an_own_one_and_opens_it(tmp_path: Path) -> None:
    root = make_logs(tmp_path / "logs")
    own = make_compared_run(tmp_path / "runs", "own")

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_compare(pilot, root, (own.path,))
        assert screen.view.charts["train_loss"].title == "train loss"
        with (root / "second" / "metrics.jsonl").open("a") as log:
            log.write('{"step": 11, "val/loss": 0.001}\n')
        await wait_until(pilot, lambda: "0.0010" in visible_text(pilot, f"#{TABLE_PANEL}"))
        screen.query_one(f"#{RUNS_PANEL}").focus()
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, ForeignRunScreen))

    drive(real_app(tmp_path / "runs"), act, SIZE)
