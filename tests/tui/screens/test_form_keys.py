"""Keys, typed bursts and the mouse in the form for a new run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.config.loader import presets
from support.messages import says
from support.screen.demo_app import visible_text, wait_until, wait_until_idle
from support.screen.form_driver import entry_of, form_of, post_keys, type_into, wait_until_tested
from support.screen.screen_driver import drive, press, real_app
from tui.app import GputrainApp
from tui.form import lr_test
from tui.palette import PALETTES
from tui.screens.dialogs import ChoiceDialog, TextDialog, TextInputDialog
from tui.screens.form import FormScreen
from tui.theme import save_palette

pytestmark = pytest.mark.usefixtures("isolated_folder")


@pytest.mark.usefixtures("unchecked")
def test_form_screen_enter_after_a_choice_typed_in_full_goes_on(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        await type_into(pilot, "schedule.name", "linear")
        await press(pilot, "enter")
        assert not form.fields.is_open
        assert form.fields.selected is not None and form.fields.selected.key == "schedule.warmup_epochs"
        await press(pilot, "up", "enter")
        assert form.fields.is_open, "nothing was typed"

    drive(real_app(tmp_path / "runs"), act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_gives_keys_of_a_burst_to_the_field_they_follow(tmp_path: Path) -> None:
    app = real_app(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        form.fields.select("device.ranks")
        post_keys(app, "down", "6", "4", "down", "down", "8", "backspace", "1", "6", "down", "2")
        await wait_until_idle(pilot)
        assert form.form.overrides == {"run.epochs": "64", "data.batch_size": "16", "data.workers": "2"}

    drive(app, act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_gets_keys_typed_while_it_opens(tmp_path: Path) -> None:
    app = real_app(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        post_keys(app, "n", "down", *"quick", "down", "down", "down", "5")
        await wait_until_idle(pilot)
        assert form_of(pilot).form.overrides == {"run.name": "quick", "run.epochs": "5"}

    drive(app, act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_search_and_enter_in_one_burst_reach_the_field(tmp_path: Path) -> None:
    app = real_app(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        post_keys(app, "ctrl+f", *"cudnn", "enter", "left", "ctrl+f", *"max rest", "enter", "2")
        await wait_until_idle(pilot)
        assert form_of(pilot).form.overrides == {"device.cudnn_benchmark": "false", "run.max_restarts": "2"}

    drive(app, act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_search_finds_keys_by_description(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "slash", *"one-hot")
        shown = visible_text(pilot, "#field-lines")
        assert "loss" in shown and "epochs" not in shown
        assert shown.startswith("╭─ Fields found ") and "─ In the description ─" in shown
        await press(pilot, "enter")
        assert "loss.name" in visible_text(pilot, "#about")
        await press(pilot, "escape")
        assert "epochs" in visible_text(pilot, "#field-lines")
        await press(pilot, "ctrl+f", *"nothing", "enter", "x")
        assert "No field contains 'nothingx'" in visible_text(pilot, "#field-lines")

    drive(real_app(tmp_path / "runs"), act)


@pytest.mark.usefixtures("unchecked")
def test_form_screen_search_shows_best_match_first_from_any_field(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await pilot.press(*["down"] * 20)
        before = form_of(pilot).fields.selected
        await press(pilot, "ctrl+f", *"image")
        lines = visible_text(pilot, "#field-lines").splitlines()
        assert "image" in lines[1] and "─ Data ─" in lines[2] and "image size" in lines[3]
        await press(pilot, "escape")
        assert form_of(pilot).fields.selected == before

    drive(real_app(tmp_path / "runs"), act, (100, 30))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_search_goes_to_field_of_that_label_or_key(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        for query, key in (("model", "model.name"), ("epochs", "run.epochs"), ("max_r", "run.max_restarts")):
            await press(pilot, "ctrl+f", *query, "enter")
            selected = form_of(pilot).fields.selected
            assert selected is not None and selected.key == key

    drive(real_app(tmp_path / "runs"), act)


@pytest.mark.usefixtures("unchecked")
def test_form_screen_arrow_keys_walk_inside_open_choices(tmp_path: Path) -> None:
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

    drive(real_app(tmp_path / "runs"), act, (120, 34))


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


@pytest.mark.usefixtures("unchecked")
def test_form_screen_accepts_typed_value_outside_choices(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        await type_into(pilot, "data.dataset", "m:d")
        await press(pilot, "tab")
        assert form.form.overrides["data.dataset"] == "m:d"
        assert form.fields.selected is not None and form.fields.selected.key == "data.path"

    drive(real_app(tmp_path / "runs"), act, (140, 48))


@pytest.mark.expensive("builds the catalogs of models and optimizers, unless another test did")
@pytest.mark.usefixtures("unchecked")
def test_form_screen_completes_names_of_models_and_optimizers(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        await type_into(pilot, "model.name", "r")
        # The catalogs are loaded by now.
        await press(pilot, *"esnet50")
        shown = visible_text(pilot, "#completions")
        assert "resnet50  " in shown and "25.6 M, torchvision, top-1 80.9%" in shown
        await press(pilot, "down", "enter")
        assert form.form.values()["model.name"] != "resnet50"
        assert "resnet50" in form.form.values()["model.name"]
        await type_into(pilot, "optim.name", "ada")
        assert "adamw" in visible_text(pilot, "#completions")
        await press(pilot, *"mw", "enter")
        assert form.form.values()["optim.name"] == "adamw"

    drive(real_app(tmp_path / "runs"), act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_lays_out_once_per_letter_with_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "schedule.name", "c")
        lay_out, layouts = FormScreen._refresh_layout, list[FormScreen]()

        def count_layout(screen: FormScreen, **options: Any) -> None:
            layouts.append(screen)
            lay_out(screen, **options)

        monkeypatch.setattr(FormScreen, "_refresh_layout", count_layout)
        for key, is_shown in (("x", False), ("backspace", True)):
            layouts.clear()
            await press(pilot, key)
            await wait_until_idle(pilot)
            assert form_of(pilot).fields.is_open is is_shown
            assert len(layouts) == 1

    drive(real_app(tmp_path / "runs"), act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_keeps_typed_values_when_preset_changes(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        await type_into(pilot, "run.epochs", "7")
        form.fields.select("preset")
        await press(pilot, "right")
        assert form.form.base != "digits"
        assert form.form.values()["run.epochs"] == "7"

    drive(real_app(tmp_path / "runs"), act, (120, 34))


def last_toast(pilot: Pilot[None]) -> str:
    return next(reversed([toast.message for toast in pilot.app._notifications]), "")


FOOTER = {
    "ctrl+s": lambda pilot: isinstance(pilot.app.screen, TextDialog),
    "enter": lambda pilot: pilot.app.screen.fields.is_open,
    "ctrl+f": lambda pilot: pilot.app.screen.fields.searching,
    "ctrl+o": lambda pilot: "seed" in visible_text(pilot, "#field-lines"),
    "ctrl+l": lambda pilot: pilot.app.screen.lr_test.in_progress,
    "ctrl+g": lambda pilot: says(last_toast(pilot), "not-selected", "^l"),
    "ctrl+n": lambda pilot: "Open a config file" in visible_text(pilot),
    "f2": lambda pilot: "Run a command" in visible_text(pilot),
    "ctrl+t": lambda pilot: isinstance(pilot.app.screen, TextInputDialog),
    "ctrl+y": lambda pilot: "--epochs 7" in pilot.app.clipboard,
    "ctrl+r": lambda pilot: pilot.app.screen.form.overrides == {},
    "escape": lambda pilot: isinstance(pilot.app.screen, ChoiceDialog),
    "f1": lambda pilot: isinstance(pilot.app.screen, TextDialog),
    "ctrl+p": lambda pilot: "CommandPalette" in type(pilot.app.screen).__name__,
    "ctrl+c": lambda pilot: pilot.app._exit,
}


# The others are pressed in a form with a mistake.
KEYS_OF_VALID_FORM = {"ctrl+l", "ctrl+y"}


@pytest.mark.expensive("builds the catalogs of models and optimizers, unless another test did")
@pytest.mark.usefixtures("unchecked")
def test_form_screen_footer_keys_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lr_test, "CHILD_PROGRAM", "import time; time.sleep(60)")

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
            if form.lr_test.in_progress:
                form.lr_test.stop()
                await wait_until_tested(pilot)
            pilot.app.clear_notifications()

    drive(real_app(tmp_path / "runs"), act, (120, 34))
    assert set(FOOTER) == {command.keys[0] for command in FormScreen.COMMAND_TABLE}


@pytest.mark.usefixtures("unchecked")
def test_form_screen_footer_shows_only_keys_that_work(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert "choose" in visible_text(pilot, "Keys") and "defaults" not in visible_text(pilot, "Keys")
        await type_into(pilot, "run.epochs", "7")
        assert "choose" not in visible_text(pilot, "Keys") and "defaults" in visible_text(pilot, "Keys")

    drive(real_app(tmp_path / "runs"), act, (140, 34))


# Mouse and cursor


@pytest.mark.usefixtures("unchecked")
def test_form_screen_click_selects_row_under_pointer(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        fields = form_of(pilot).fields
        lines = visible_text(pilot, "#field-lines").splitlines()
        rows = [index for index, line in enumerate(lines) if 0 < index < len(lines) - 1 and "─" not in line]
        for row in (rows[1], rows[len(rows) // 2], rows[-1]):
            await pilot.click("#field-lines", offset=(5, row))
            await wait_until_idle(pilot)
            assert fields.selected is not None
            assert fields.selected.label in lines[row]
            assert entry_of(pilot).region.y == pilot.app.screen.query_one("#field-lines").region.y + row
        await pilot.click("#field-lines", offset=(5, rows[2] - 1))

    drive(real_app(tmp_path / "runs"), act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_click_opens_and_chooses_a_choice(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        form.fields.select("data.dataset")
        await pilot.pause()
        await type_into(pilot, "model.weights", "p")
        assert form.fields.is_open
        await pilot.click("#completions", offset=(4, 1))
        await wait_until_idle(pilot)
        assert form.form.overrides["model.weights"] == "pretrained"
        form.fields.select("precision.amp")
        await pilot.pause()
        await pilot.click("#field-entry")
        await wait_until_idle(pilot)
        assert form.fields.is_open

    drive(real_app(tmp_path / "runs"), act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_wheel_scrolls_and_cursor_stays_in_view(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "ctrl+o")
        form = form_of(pilot)
        lines: Any = form.query_one("#field-lines")
        for _ in range(5):
            lines.scroll_relative(y=3, animate=False, immediate=True)
        await wait_until_idle(pilot)
        assert lines.scroll_offset.y == 15
        assert form.fields.selected is not None and form.fields.selected.label in visible_text(pilot, "#field-lines")
        assert lines.region.contains_region(entry_of(pilot).region)

    drive(real_app(tmp_path / "runs"), act, (80, 24))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
def test_form_screen_shows_cursor_and_selection_of_input_in_theme(palette: Any, tmp_path: Path) -> None:
    save_palette(palette)
    app = real_app(tmp_path / "runs")

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "down")
        entry = entry_of(pilot)
        plain = entry.rich_style
        for part in ("input--cursor", "input--selection"):
            style = entry.get_component_rich_style(part)
            assert style.reverse or style.bgcolor != plain.bgcolor
        assert entry.has_focus

    drive(app, act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_has_no_widget_per_field(tmp_path: Path) -> None:
    """Textual styles and lays out each widget on every key."""

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "ctrl+o")
        assert len(form_of(pilot).fields.query("*")) == 3

    drive(real_app(tmp_path / "runs"), act, (120, 34))


def test_form_types_keys_after_save_preset_into_its_dialog(tmp_path: Path, unchecked: None) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        form.fields.select("run.epochs")
        await pilot.pause()
        assert isinstance(pilot.app, GputrainApp)
        post_keys(pilot.app, "ctrl+t", "a", "b", "c", "enter")
        await wait_until(pilot, lambda: "abc" in presets())
        assert form.form.overrides == {}

    drive(real_app(tmp_path), act)
