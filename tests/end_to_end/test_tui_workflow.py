"""The workflow of a new user with a real run: configure, start, watch, detach, attach, stop, resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from textual.pilot import Pilot

from support.gputrain_command import Gputrain
from support.screen.demo_app import no_gpu_feed, visible_text, wait_until
from tui.screens.app import GputrainApp

PATIENCE = 60.0


async def set_field(pilot: Pilot[None], key: str, text: str) -> None:
    screen: Any = pilot.app.screen
    screen.fields.select(key)
    await pilot.press(*text)


def test_tui_workflow_returns_to_form_when_run_is_rejected(gputrain: Gputrain, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in gputrain.environment.items():
        monkeypatch.setenv(name, value)

    async def drive() -> None:
        app = GputrainApp(gputrain.runs, gpu_poller=no_gpu_feed())
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            await pilot.press("n")
            await pilot.pause()
            await set_field(pilot, "run.name", "taken")
            await wait_until(pilot, lambda: "ready to start" in visible_text(pilot), PATIENCE)
            # After the form has checked the name.
            (gputrain.runs / "taken").mkdir(parents=True)
            await pilot.press("ctrl+s")
            await wait_until(pilot, lambda: "✗ not started" in visible_text(pilot), PATIENCE)
            await wait_until(pilot, lambda: "taken already exists" in " ".join(visible_text(pilot).split()), PATIENCE)
            await pilot.press("escape")
            await pilot.pause()
            assert "--name taken" in visible_text(pilot, "#command")

    asyncio.run(drive())
