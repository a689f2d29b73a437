"""Runs of commands in the list of runs: columns, filter, and their comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from engine.runs.ownership import Ownership
from support.runs.command_folder import make_command_finished, make_command_run
from support.screen.demo_app import visible_text, wait_until, wait_until_idle
from support.screen.screen_driver import drive, press, real_app, type_keys
from tui.screens.compare import CompareScreen
from tui.screens.run import RunScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path) -> Iterator[Path]:
    """A live and a finished run of the same command."""
    root, now = tmp_path / "runs", time.time()
    for name, hidden in (("small", 8), ("large", 64)):
        rows = [{"loss": 8 / (hidden * (step + 1))} for step in range(10)]
        end = [make_command_finished(now)] if name == "small" else []
        folder = make_command_run(root, name, *end, now=now, rows=rows, parameters={"lr": 0.1, "hidden": hidden})
    owner = Ownership(folder)
    yield root
    owner.release()


async def open_list(pilot: Pilot[None]) -> None:
    await press(pilot, "r")
    await wait_until_idle(pilot)


def test_list_has_metrics_and_differing_parameters_of_commands_and_opens_one(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await open_list(pilot)
        header = visible_text(pilot, "#all-runs").splitlines()[1].split()
        assert {"state", "step", "loss", "hidden", "command"} <= set(header) and "lr" not in header
        await type_keys(pilot, "slash", *"hidden>10")
        text = visible_text(pilot, "#all-runs")
        assert "large" in text and "small" not in text
        await press(pilot, "escape")
        await type_keys(pilot, "slash", *"small", "enter")
        screen = pilot.app.screen
        assert screen.is_available("again") and not screen.is_available("resume")  # type: ignore[attr-defined]
        screen.query_one("#all-runs").focus()
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, RunScreen)

    drive(real_app(runs), act, (160, 40))


def test_comparison_shows_metrics_that_a_command_begins_later(runs: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await open_list(pilot)
        await press(pilot, "M", "c")
        (runs / "large" / "metrics" / "own.jsonl").write_text('{"step": 1, "reward": 5}\n{"step": 2, "reward": 6}\n')
        screen = pilot.app.screen
        assert isinstance(screen, CompareScreen)
        await wait_until(pilot, lambda: "reward" in [row.title for row in screen._chart_rows()])

    drive(real_app(runs), act, (160, 48))
