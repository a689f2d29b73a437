"""The compare screen of runs that other programs have recorded: their charts, parameters and growth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.watch.folders import find_runs
from support.runs.compared_runs import make_compared_run
from support.screen.demo_app import visible_text, wait_until
from support.screen.screen_driver import drive, real_app
from tui.screens.app import GputrainApp
from tui.screens.compare import CHART_PANEL, TABLE_PANEL, CompareScreen
from tui.screens.run import RunScreen
from tui.screens.widgets.lines import Lines

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
    await wait_until(pilot, lambda: screen._shown == (screen.compare_poller.version, True))
    return screen


def test_compare_follows_a_foreign_run_beside_an_own_one_and_opens_it(tmp_path: Path) -> None:
    root = make_logs(tmp_path / "logs")
    own = make_compared_run(tmp_path / "runs", "own")

    async def act(pilot: Pilot[None]) -> None:
        screen = await open_compare(pilot, root, (own.path,))
        assert screen.view.charts[CHART_PANEL].title == "val acc"
        with (root / "second" / "metrics.jsonl").open("a") as log:
            log.write('{"step": 11, "val/loss": 0.001}\n')
        await wait_until(pilot, lambda: "0.0010" in visible_text(pilot, f"#{TABLE_PANEL}"))
        screen.query_one(f"#{TABLE_PANEL}", Lines).select_key("1")
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))

    drive(real_app(tmp_path / "runs"), act, SIZE)
