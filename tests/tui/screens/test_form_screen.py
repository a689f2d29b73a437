"""The form for a new run, driven by key presses and clicks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from demo_app import demo_app, demo_snapshot, visible_text, wait_until, wait_until_idle
from engine.config.loader import presets
from engine.gpus.selection import find_current_use
from engine.utils.files import state_folder
from screen_driver import drive, press, real_app
from tui.app import GputrainApp
from tui.form.checks import FormChecker
from tui.form.model import Form, load_last_form, save_last_form
from tui.palette import PALETTES
from tui.screens.dialogs import ChoiceDialog, TextDialog, TextInputDialog
from tui.screens.form import FormScreen
from tui.screens.monitor import MonitorScreen
from tui.theme import save_palette

pytestmark = pytest.mark.usefixtures("isolated_folder")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of keys: the values are validated, but not checked against this host."""
    monkeypatch.setattr(FormChecker, "check", lambda *_: None)


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


def plan_of(pilot: Pilot[None]) -> str:
    """Text of the plan without its frame and line breaks."""
    return " ".join(visible_text(pilot, "#plan").replace("│", " ").split())


def entry_of(pilot: Pilot[None]) -> Input:
    return pilot.app.screen.query_one("#field-entry", Input)


# Values and checks


def test_form_screen_marks_invalid_values_and_refuses_start(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "0")
        assert "✗ 0 is not allowed: must be greater than or equal to 1" in visible_text(pilot, "#about")
        await type_into(pilot, "data.batch_size", "x")
        assert "✗ 2 errors to fix" in visible_text(pilot, "#title")
        assert "✗ epochs" in visible_text(pilot) and "✗ batch size" in visible_text(pilot)
        assert "✗ run.epochs: 0 is not allowed" in visible_text(pilot, "#plan")
        await press(pilot, "ctrl+s")
        shown = visible_text(pilot)
        assert "Not started: 2 errors to fix" in shown
        assert "run.epochs" in shown and "data.batch_size" in shown
        await press(pilot, "escape")
        await type_into(pilot, "run.epochs", "3")
        await type_into(pilot, "data.batch_size", "16")
        assert "ready to start" in visible_text(pilot)
        assert "44 steps per epoch, 132 total" in visible_text(pilot, "#plan")
        assert "gputrain run digits --epochs 3 --batch-size 16" in visible_text(pilot, "#command").replace("\n", "")

    drive(real_app(tmp_path / "runs"), act, (140, 40))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_shows_fields_of_chosen_optimizer_and_schedule(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form = form_of(pilot)
        assert "momentum" in visible_text(pilot) and "betas" not in visible_text(pilot)
        form.edit("optim.name", "adamw")
        form.edit("schedule.name", "step")
        await wait_until_idle(pilot)
        shown = visible_text(pilot, "#field-lines")
        assert "betas" in shown and "momentum" not in shown
        assert "decay every" in shown and "final LR ratio" not in shown

    drive(real_app(tmp_path / "runs"), act, (140, 42))


def test_form_screen_shows_facts_and_plan_of_values(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        shown = visible_text(pilot, "#field-lines")
        assert "10 classes, 1,797 images" in shown
        assert "21.6 k parameters" in shown
        assert "digits-1" in shown and "next free name" in shown
        plan = visible_text(pilot, "#plan")
        assert "22 steps per epoch, 330 total" in plan and "1,438 train, 359 val images" in plan

    drive(real_app(tmp_path / "runs"), act, (120, 34))


def test_form_screen_reports_name_that_is_taken_while_typing(tmp_path: Path) -> None:
    (tmp_path / "runs" / "taken").mkdir(parents=True)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.name", "taken")
        assert "taken already exists" in plan_of(pilot)
        await type_into(pilot, "run.name", "last")
        assert "last is reserved" in visible_text(pilot, "#about")

    drive(real_app(tmp_path / "runs"), act, (80, 24))


@pytest.mark.parametrize("size", [(60, 20), (80, 24)], ids=["60x20", "80x24"])
def test_form_screen_warns_of_gpu_that_others_use(size: tuple[int, int], demo_runs_folder: Path) -> None:
    busy = next(gpu for gpu in demo_snapshot(0.0).gpus if "user" in str(find_current_use(gpu)))

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "device.gpus", str(busy.index))
        plan = plan_of(pilot)
        assert f"! sharing GPUs that are not free: GPU {busy.index}: in use by" in plan
        assert "1 GPU, global batch size 32" in plan
        assert "error" not in visible_text(pilot, "#plan")

    drive(demo_app(demo_runs_folder), act, size)


def test_form_screen_checks_again_when_driver_has_answered(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        poller = pilot.app.gpu_poller  # type: ignore[attr-defined]
        without_gpus, poller.snapshot = poller.snapshot, None
        await press(pilot, "n")
        form = form_of(pilot)
        form.edit("device.backend", "nccl")
        await wait_until_idle(pilot)
        assert "ready to start" in visible_text(pilot)
        poller.snapshot = without_gpus
        await wait_until(pilot, lambda: "1 error to fix" in visible_text(pilot))
        assert [problem.location for problem in form._all_problems()] == ["device.backend"]

    drive(real_app(tmp_path / "runs"), act, (140, 48))


def test_form_screen_of_preset_without_data_asks_for_path(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form_of(pilot).edit("preset", "flowers")
        await wait_until_idle(pilot)
        assert "preset flowers" in visible_text(pilot, "#title")
        assert "data.path: folder needs the folder of the dataset" in plan_of(pilot)

    drive(real_app(tmp_path / "runs"), act)


# Keys


@pytest.mark.usefixtures("unchecked")
def test_form_screen_counts_and_marks_changes(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert "preset digits" in visible_text(pilot, "#title") and "change" not in visible_text(pilot, "#title")
        await type_into(pilot, "run.epochs", "7")
        await type_into(pilot, "optim.lr", "0.3")
        assert "preset digits, 2 changes" in visible_text(pilot, "#title")
        assert "• epochs" in visible_text(pilot) and "• learning rate" in visible_text(pilot)
        await press(pilot, "ctrl+r")
        assert form_of(pilot).form.overrides == {}
        assert entry_of(pilot).value == "0.1"

    drive(real_app(tmp_path / "runs"), act, (120, 34))


@pytest.mark.usefixtures("unchecked")
def test_form_screen_undoes_reset(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "7")
        await press(pilot, "ctrl+r")
        assert "change" not in visible_text(pilot, "#title")
        assert [toast.message for toast in pilot.app._notifications] == ["Reset the form; ^r undoes it"]
        await press(pilot, "ctrl+r")
        assert form_of(pilot).form.overrides == {"run.epochs": "7"}
        await type_into(pilot, "run.epochs", "8")
        await press(pilot, "ctrl+r")
        assert form_of(pilot).form.overrides == {}

    drive(real_app(tmp_path / "runs"), act, (120, 34))


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
        await press(pilot, "enter")
        assert "loss.name" in visible_text(pilot, "#about")
        await press(pilot, "escape")
        assert "epochs" in visible_text(pilot, "#field-lines")
        await press(pilot, "ctrl+f", *"nothing", "enter", "x")
        assert "No field contains 'nothingx'" in visible_text(pilot, "#field-lines")

    drive(real_app(tmp_path / "runs"), act)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("query", "key"), [("model", "model.name"), ("epochs", "run.epochs"), ("max_r", "run.max_restarts")]
)
def test_form_screen_search_goes_to_field_of_that_label_or_key(query: str, key: str, tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "ctrl+f", *query, "enter")
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


FOOTER = {
    "ctrl+s": lambda pilot: isinstance(pilot.app.screen, TextDialog),
    "enter": lambda pilot: pilot.app.screen.fields.is_open,
    "ctrl+f": lambda pilot: pilot.app.screen.fields.searching,
    "ctrl+o": lambda pilot: "seed" in visible_text(pilot, "#field-lines"),
    "ctrl+t": lambda pilot: isinstance(pilot.app.screen, TextInputDialog),
    "ctrl+y": lambda pilot: "needs a valid config" in [note.message for note in pilot.app._notifications][-1],
    "ctrl+r": lambda pilot: pilot.app.screen.form.overrides == {},
    "escape": lambda pilot: isinstance(pilot.app.screen, ChoiceDialog),
    "f1": lambda pilot: isinstance(pilot.app.screen, TextDialog),
    "ctrl+p": lambda pilot: "CommandPalette" in type(pilot.app.screen).__name__,
    "ctrl+c": lambda pilot: pilot.app._exit,
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("key", FOOTER)
def test_form_screen_footer_key_works(key: str, tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form_of(pilot).edit("run.epochs", "many")
        await wait_until_idle(pilot)
        await pilot.press(key)
        await pilot.pause()
        assert FOOTER[key](pilot)

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
        form.fields.select("schedule.name")
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


# Leaving the form


@pytest.mark.usefixtures("unchecked")
def test_form_screen_leaves_unchanged_form_without_question(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "down", "down", "escape")
        assert isinstance(pilot.app.screen, MonitorScreen)

    drive(real_app(tmp_path / "runs"), act)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("keys", "leaves", "remembered"),
    [
        (["enter"], False, Form("digits")),
        (["escape"], False, Form("digits")),
        (["down", "enter"], True, Form("digits", {"run.epochs": "7"})),
        (["down", "down", "enter"], True, Form("digits")),
    ],
    ids=["continue", "escape", "keep", "discard"],
)
def test_form_screen_asks_before_it_loses_changes(
    keys: list[str], leaves: bool, remembered: Form, tmp_path: Path
) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "7")
        await press(pilot, "escape")
        assert "Discard the changes?" in visible_text(pilot)
        await press(pilot, *keys)
        assert isinstance(pilot.app.screen, MonitorScreen if leaves else FormScreen)
        assert load_last_form() == remembered

    drive(real_app(tmp_path / "runs"), act)


@pytest.mark.usefixtures("unchecked")
def test_form_screen_keeps_changes_for_next_form_when_app_quits(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "7")
        await pilot.press("ctrl+c")

    drive(real_app(tmp_path / "runs"), act)
    assert load_last_form() == Form("digits", {"run.epochs": "7"})


@pytest.mark.usefixtures("unchecked")
def test_form_screen_of_earlier_run_is_titled_again(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "r", "a")
        title = visible_text(pilot, "#title")
        assert "again: " in title and "new run" not in title

    drive(demo_app(demo_runs_folder), act)


def test_form_screen_in_demo_starts_and_saves_nothing(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "ctrl+s")
        assert isinstance(pilot.app.screen, FormScreen)

    drive(demo_app(demo_runs_folder), act)
    assert not (state_folder() / "form.json").exists()


@pytest.mark.usefixtures("unchecked")
def test_form_screen_names_file_of_preset_outside_presets_folder(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "ctrl+t")
        await pilot.press(*"./mine.yaml")
        await press(pilot, "enter")
        messages = [notification.message for notification in pilot.app._notifications]
        assert any(message.endswith("Start it with `gputrain run mine.yaml`.") for message in messages)

    drive(real_app(tmp_path / "runs"), act)


def test_field_equal_to_its_default_stays_while_it_is_typed_in(tmp_path: Path, unchecked: None) -> None:
    save_last_form(Form("digits", {"optim.accumulate": "2"}))

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "optim.accumulate", "1")  # the default
        await press(pilot, "6")
        assert form_of(pilot).form.overrides == {"optim.accumulate": "16"}

    drive(real_app(tmp_path), act, (80, 24))


@pytest.mark.parametrize("value", ["auto", "all", "free:2", "0, 2"])
def test_gpu_dialog_keeps_value_that_is_only_confirmed(value: str, tmp_path: Path, unchecked: None) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "device.gpus", value)
        await press(pilot, "enter", "enter")
        assert form_of(pilot).form.values()["device.gpus"] == value

    drive(demo_app(tmp_path), act)


def test_gpu_dialog_selects_gpu_of_uuid(tmp_path: Path, unchecked: None) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "device.gpus", str(demo_snapshot(0.0).gpus[2].uuid))
        await press(pilot, "enter", "space", "enter")
        assert form_of(pilot).form.values()["device.gpus"] == "0,2"

    drive(demo_app(tmp_path), act)


def test_form_ignores_picked_gpu_that_has_gone(tmp_path: Path, unchecked: None) -> None:
    async def act(pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, GputrainApp)
        pilot.app.picked_gpu_uuids = {"GPU-of-before"}
        await press(pilot, "n")
        assert form_of(pilot).form.values()["device.gpus"] == "auto"

    drive(demo_app(tmp_path), act)


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
