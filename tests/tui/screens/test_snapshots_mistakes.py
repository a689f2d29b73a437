"""SVG snapshot of the screen of the mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import demo_app
from support.screen.mistakes_driver import drawn, inspected_run, open_mistakes
from support.screen.screen_driver import press
from support.screen.screen_snapshots import Compare, matches_snapshot

pytestmark = pytest.mark.usefixtures("frozen_environment")


def test_mistakes(snap_compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = inspected_run(Path("runs"), Path("photos"))
    # The path of the folder differs in each test.
    monkeypatch.setattr("tui.screens.mistakes.image_path", lambda *_: "/data/photos/cat/tabby.png")
    monkeypatch.setattr("tui.screens.tables.mistakes.image_path", lambda image, info: f"/data/photos/{image.path}")

    async def open_screen(pilot: Pilot[None]) -> None:
        await open_mistakes(pilot)
        await press(pilot, "right")
        await drawn(pilot)

    assert matches_snapshot(snap_compare, demo_app(Path("runs"), run=run.name), before=open_screen)
