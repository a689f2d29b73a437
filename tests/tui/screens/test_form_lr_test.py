"""The learning rate range test of the form: started, stopped, shown and used by keys."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from textual.pilot import Pilot

from support.gputrain_command import wait_for
from support.messages import says
from support.screen.demo_app import demo_app, visible_text, wait_until, wait_until_idle
from support.screen.form_driver import form_of, type_into, wait_until_tested
from support.screen.screen_driver import drive, press, real_app
from tui.form import lr_test

pytestmark = pytest.mark.usefixtures("isolated_folder", "unchecked")

FAILING_LR_FIND = "import sys; sys.exit('error: device.gpus: GPU 0 is in use by alice')"


def lr_find_processes() -> list[psutil.Process]:
    """Tests that this process has started, with their ranks."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and "lr-find" in child.cmdline()]


def toasts(pilot: Pilot[None]) -> list[str]:
    return [toast.message for toast in pilot.app._notifications]


@pytest.mark.nightly
def test_form_screen_tests_learning_rates_and_uses_suggestions(tmp_path: Path) -> None:
    """With the real command on the digits."""

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "device.ranks", "1")
        assert "^l find LR" in visible_text(pilot) and "^g" not in visible_text(pilot)
        await pilot.press("ctrl+l")
        form = form_of(pilot)
        assert form.lr_test.in_progress
        await pilot.press("ctrl+s")
        [toast] = toasts(pilot)
        assert says(toast, "conflict", "^l")
        await wait_until_tested(pilot)
        suggestion = form.lr_test.suggestion
        assert suggestion is not None
        assert toasts(pilot)[-1] == f"Suggested learning rate: {suggestion.valley:g}; ^g sets it"
        await pilot.press("ctrl+g")
        await wait_until_idle(pilot)
        assert f"--lr {suggestion.valley:g}" in visible_text(pilot, "#command")
        assert not (tmp_path / "runs").exists()

    drive(real_app(tmp_path / "runs"), act, (160, 48))


def test_form_screen_kills_test_when_it_is_stopped_or_left(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        for key in ("ctrl+l", "escape"):
            await pilot.press("ctrl+l")
            await wait_until(pilot, lambda: len(lr_find_processes()) == 1)
            await pilot.press(key)
            await wait_until(pilot, lambda: not lr_find_processes())
            if key == "ctrl+l":
                assert "stopped" in visible_text(pilot, "#form-lr-test")
                assert "^l find LR" in visible_text(pilot)

    drive(real_app(tmp_path / "runs"), act, (160, 48))


def test_form_screen_kills_test_when_app_is_quit(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await pilot.press("ctrl+l")
        await wait_until(pilot, lambda: len(lr_find_processes()) == 1)
        await pilot.press("ctrl+c")

    drive(real_app(tmp_path / "runs"), act, (160, 48))
    wait_for(lambda: not lr_find_processes(), "the end of the test", 5)


def test_form_screen_shows_why_test_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lr_test, "CHILD_PROGRAM", FAILING_LR_FIND)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await pilot.press("ctrl+l")
        await wait_until_tested(pilot)
        [toast] = toasts(pilot)
        assert says(toast, "process-failed", "device.gpus: GPU 0 is in use by alice")
        assert "failed" in visible_text(pilot, "#form-lr-test")
        await pilot.press("ctrl+g")
        assert says(toasts(pilot)[-1], "not-selected", "^l")
        assert form_of(pilot).form.values()["optim.lr"] == "0.1"

    drive(real_app(tmp_path / "runs"), act, (160, 48))


def test_form_screen_refuses_test_and_copy_of_invalid_values_and_test_in_demo(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "data.batch_size", "x")
        await pilot.press("ctrl+l")
        [toast] = toasts(pilot)
        assert says(toast, "invalid-value")
        assert not form_of(pilot).lr_test.in_progress
        await pilot.press("ctrl+y")
        assert says(toasts(pilot)[-1], "invalid-value") and len(toasts(pilot)) == 2
        assert pilot.app.clipboard == ""

    drive(real_app(tmp_path / "runs"), act, (160, 48))

    async def act_in_demo(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await pilot.press("ctrl+l")
        [toast] = toasts(pilot)
        assert says(toast, "not-supported")
        assert not form_of(pilot).lr_test.in_progress

    drive(demo_app(tmp_path / "runs"), act_in_demo, (160, 48))
