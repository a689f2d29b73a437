"""The screen, driven by its keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

from test_journal import epoch, started
from test_runs import make_run
from textual.widgets import DataTable, Static

from engine.events import RunFinished
from tui.app import CockpitApp


def test_it_lists_the_runs_as_they_are_and_quits_with_q(tmp_path: Path) -> None:
    make_run(tmp_path, "digits-[1]", started(), epoch(1, 0.9), RunFinished(state="finished"))

    async def drive() -> None:
        app = CockpitApp(tmp_path)
        async with app.run_test(size=(80, 24)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            cells = [str(cell) for cell in app.query_one(DataTable).get_row_at(0)]
            assert cells[:4] == ["digits-[1]", "finished", "1/3", "0.9000"]
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(drive())


def test_without_runs_it_says_how_to_start_one(tmp_path: Path) -> None:
    async def drive() -> None:
        app = CockpitApp(tmp_path)
        async with app.run_test(size=(80, 24)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert "gputrain run --headless digits" in str(app.query_one("#message", Static).content)

    asyncio.run(drive())
