"""The form for a new run, driven by key presses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from demo_app import demo_app, visible_text, wait_until, wait_until_idle
from engine.utils.files import state_folder
from screen_driver import drive, press, real_app
from tui.screens.form import FormScreen

pytestmark = pytest.mark.usefixtures("isolated_folder")


async def type_into(pilot: Pilot[None], key: str, text: str) -> None:
    screen: Any = pilot.app.screen
    field = screen.query_one(f"#field-{key.replace('.', '-')}")
    field.control.focus()
    await pilot.pause()
    field.control.value = ""
    await pilot.press(*text)
    await wait_until_idle(pilot)


def test_form_screen_marks_invalid_values_and_refuses_start(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "0")
        assert "✗ 0 is not allowed: must be greater than or equal to 1" in visible_text(pilot)
        await type_into(pilot, "data.batch_size", "x")
        await press(pilot, "ctrl+s")
        shown = visible_text(pilot)
        assert "Not started: 2 errors to fix" in shown
        assert "run.epochs" in shown and "data.batch_size" in shown
        await press(pilot, "escape")
        await type_into(pilot, "run.epochs", "3")
        await type_into(pilot, "data.batch_size", "16")
        assert "ready to start" in visible_text(pilot)
        assert "44 steps per epoch, 132 total" in visible_text(pilot, "#plan")
        assert "gputrain run digits --epochs 3 --batch-size 16" in visible_text(pilot, "#command")

    drive(real_app(tmp_path / "runs"), act, (140, 40))


def test_form_screen_shows_fields_of_chosen_optimizer_and_schedule(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert "optim.momentum" in visible_text(pilot) and "optim.betas" not in visible_text(pilot)
        screen: Any = pilot.app.screen
        screen.query_one("#field-optim-name").control.value = "adamw"
        screen.query_one("#field-schedule-name").control.value = "step"
        await wait_until_idle(pilot)
        shown = visible_text(pilot)
        assert "optim.betas" in shown and "optim.momentum" not in shown
        assert "schedule.step_size" in shown and "schedule.final_lr_ratio" not in shown

    drive(real_app(tmp_path / "runs"), act, (140, 48))


def test_form_screen_accepts_typed_value_outside_choices(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        screen: Any = pilot.app.screen
        screen.query_one("#field-optim-name").control.value = "other …"
        await wait_until_idle(pilot)
        assert "one of torch's" in visible_text(pilot, ".dialog")
        await press(pilot, "escape")
        assert "optim.name" not in screen.form.overrides
        screen.query_one("#field-data-dataset").control.value = "other …"
        await wait_until_idle(pilot)
        await press(pilot, *"m:d", "enter")
        assert screen.form.overrides["data.dataset"] == "m:d"
        assert screen.query_one("#field-data-dataset").control.value == "m:d"

    drive(real_app(tmp_path / "runs"), act, (140, 48))


def test_form_screen_checks_again_when_driver_has_answered(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        poller = pilot.app.gpu_poller  # type: ignore[attr-defined]
        without_gpus, poller.snapshot = poller.snapshot, None
        await press(pilot, "n")
        screen: Any = pilot.app.screen
        screen.form.set_value("device.backend", "nccl")
        screen._show_values()
        await wait_until_idle(pilot)
        assert "ready to start" in visible_text(pilot)
        poller.snapshot = without_gpus
        await wait_until(pilot, lambda: "1 error to fix" in visible_text(pilot))
        assert [problem.location for problem in screen._all_problems()] == ["device.backend"]

    drive(real_app(tmp_path / "runs"), act, (140, 48))


def test_form_screen_search_finds_keys_by_description(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        pilot.app.screen.query_one("#preset").focus()
        await press(pilot, "slash", *"cudnn")
        assert "device.cudnn_benchmark" in visible_text(pilot)
        assert "run.epochs" not in visible_text(pilot, "#fields")

    drive(real_app(tmp_path / "runs"), act)


def test_form_screen_in_demo_starts_and_saves_nothing(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "ctrl+s")
        assert isinstance(pilot.app.screen, FormScreen)

    drive(demo_app(demo_runs_folder), act)
    assert not (state_folder() / "form.json").exists()


def test_form_screen_names_file_of_preset_outside_presets_folder(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        screen: Any = pilot.app.screen
        screen.action_save_preset()
        await wait_until_idle(pilot)
        await pilot.press(*"./mine.yaml")
        await press(pilot, "enter")
        messages = [notification.message for notification in pilot.app._notifications]
        assert any(message.endswith("Start it with `gputrain run mine.yaml`.") for message in messages)

    drive(real_app(tmp_path / "runs"), act)
