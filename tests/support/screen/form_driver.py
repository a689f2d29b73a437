"""Reads and types into the form of a running app in a test."""

from __future__ import annotations

from textual.pilot import Pilot
from textual.widgets import Input

from support.screen.demo_app import wait_until_idle
from tui.screens.form import FormScreen


def form_of(pilot: Pilot[None]) -> FormScreen:
    screen = pilot.app.screen
    assert isinstance(screen, FormScreen)
    return screen


async def type_into(pilot: Pilot[None], key: str, text: str) -> None:
    """Select a field, whose text typing replaces."""
    form_of(pilot).fields.select(key)
    await pilot.press(*text)
    await wait_until_idle(pilot)


def entry_of(pilot: Pilot[None]) -> Input:
    return pilot.app.screen.query_one("#field-entry", Input)
