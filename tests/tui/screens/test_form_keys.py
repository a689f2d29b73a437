"""Keys, typed bursts and the mouse in the form for a new run."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from support.screen.demo_app import visible_text, wait_until_idle
from support.screen.form_driver import entry_of, form_of, type_into
from support.screen.screen_driver import drive, press, press_in_burst, real_app, type_keys
from tui.screens.dialogs import ChoiceDialog, TextDialog
from tui.screens.form import FormScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")


@pytest.mark.usefixtures("unchecked")
def test_form_screen_lists_choices_until_one_is_taken_or_typed_in_full(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        form.fields.select("schedule.name")
        await press(pilot, "enter", "down", "down", "up")
        assert form.fields.is_open
        assert form.fields.selected is not None and form.fields.selected.key == "schedule.name"
        await press(pilot, "enter")
        assert form.form.overrides == {"schedule.name": "restarts"}
        assert not form.fields.is_open
        await press(pilot, "enter", "down", "escape")
        assert form.form.overrides == {"schedule.name": "restarts"}
        assert entry_of(pilot).value == "restarts"
        await type_into(pilot, "schedule.name", "linear")
        await press(pilot, "enter")
        assert not form.fields.is_open
        assert form.fields.selected is not None and form.fields.selected.key == "schedule.warmup_epochs"
        await press(pilot, "up", "enter")
        assert form.fields.is_open, "nothing was typed"

    drive(real_app(tmp_path / "runs"), act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_gets_keys_typed_while_it_opens(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        press_in_burst(pilot, "n", "down", *"quick", "down", "down", "down", "5")
        await wait_until_idle(pilot)
        assert form_of(pilot).form.overrides == {"run.name": "quick", "run.epochs": "5"}

    drive(real_app(tmp_path / "runs"), act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_search_finds_keys_by_description(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_keys(pilot, "slash", *"one-hot")
        shown = visible_text(pilot, "#field-lines")
        assert "loss" in shown and "epochs" not in shown
        assert shown.startswith("╭─ Fields found ") and "─ In the description ─" in shown
        await press(pilot, "enter")
        assert "loss.name" in visible_text(pilot, "#about")
        await press(pilot, "escape")
        assert "epochs" in visible_text(pilot, "#field-lines")
        await type_keys(pilot, "ctrl+f", *"nothing", "enter", "x")
        assert "No field contains 'nothingx'" in visible_text(pilot, "#field-lines")

    drive(real_app(tmp_path / "runs"), act)


@pytest.mark.usefixtures("unchecked")
def test_form_screen_changes_fixed_choices_without_opening_them(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        form.fields.select("precision.amp")
        await press(pilot, "right", "right")
        assert form.form.overrides == {"precision.amp": "bf16"}
        await press(pilot, "left", "left", "left")
        assert form.form.overrides == {"precision.amp": "O3"}
        await press(pilot, *"bf", "enter")
        assert form.form.overrides == {"precision.amp": "bf16"}
        await press(pilot, *"zz", "down")
        assert form.form.overrides == {"precision.amp": "bf16"}
        form.fields.select("augment.flip")
        await press(pilot, "space")
        assert form.form.overrides["augment.flip"] == "true"

    drive(real_app(tmp_path / "runs"), act, (120, 34))


FOOTER = {
    "ctrl+s": lambda pilot: isinstance(pilot.app.screen, TextDialog),
    "enter": lambda pilot: pilot.app.screen.fields.is_open,
    "ctrl+f": lambda pilot: pilot.app.screen.fields.searching,
    "ctrl+o": lambda pilot: "seed" in visible_text(pilot, "#field-lines"),
    "f2": lambda pilot: "Run a command" in visible_text(pilot),
    "ctrl+y": lambda pilot: "--epochs 7" in pilot.app.clipboard,
    "ctrl+r": lambda pilot: pilot.app.screen.form.overrides == {},
    "escape": lambda pilot: isinstance(pilot.app.screen, ChoiceDialog),
    "f1": lambda pilot: isinstance(pilot.app.screen, TextDialog),
    "ctrl+c": lambda pilot: pilot.app._exit,
}


# The others are pressed in a form with a mistake.
KEYS_OF_VALID_FORM = {"ctrl+y"}


@pytest.mark.usefixtures("unchecked")
def test_form_screen_footer_keys_work(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        for key, has_worked in FOOTER.items():
            form.edit("run.epochs", "7" if key in KEYS_OF_VALID_FORM else "many")
            await wait_until_idle(pilot)
            assert not has_worked(pilot), key
            await pilot.press(key)
            await pilot.pause()
            assert has_worked(pilot), key
            # Return to the form, and close its choices or its search.
            while pilot.app.screen is not form or form.fields.is_open or form.fields.searching:
                await press(pilot, "escape")
            pilot.app.clear_notifications()

    drive(real_app(tmp_path / "runs"), act, (120, 34))
    assert set(FOOTER) == {key.keys[0] for key in (*FormScreen.SCREEN_KEYS, *FormScreen.SHARED_KEYS)}
