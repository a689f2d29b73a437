"""Reads and types into the form of a running app in a test."""

from __future__ import annotations

from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from support.screen.demo_app import wait_until, wait_until_idle
from tui.app import GputrainApp
from tui.screens.form import FormScreen

# A program that prints what `gputrain lr-find --json` prints.
FAST_LR_FIND = """
import json, sys
def line(kind, **values):
    print(json.dumps({"type": kind, **values}), flush=True)
line("run_started", world_size=1)
for step in range(1, 81):
    line("lr_step", step=step, loss=2.0 / (1 + (step / 50) ** 8) + 0.1)
line("lr_step", step=81, loss=None)
line("lr_found", valley=0.0148, steepest=0.0107)
"""


def form_of(pilot: Pilot[None]) -> FormScreen:
    screen = pilot.app.screen
    assert isinstance(screen, FormScreen)
    return screen


async def type_into(pilot: Pilot[None], key: str, text: str) -> None:
    """Select a field, whose text typing replaces."""
    form_of(pilot).fields.select(key)
    await pilot.press(*text)
    await wait_until_idle(pilot)


def post_keys(app: GputrainApp, *keys: str) -> None:
    """Send keys that arrive together, before the first of them is handled."""
    for key in keys:
        app.post_message(Key(key, key if len(key) == 1 else None))


def entry_of(pilot: Pilot[None]) -> Input:
    return pilot.app.screen.query_one("#field-entry", Input)


async def wait_until_tested(pilot: Pilot[None]) -> None:
    """Wait for the end of the learning rate range test."""
    await wait_until(pilot, lambda: not form_of(pilot).lr_test.in_progress)
    await wait_until_idle(pilot)
