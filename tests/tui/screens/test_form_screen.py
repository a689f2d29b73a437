"""Values, checks and leaving of the form for a new run, driven by key presses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.base.files import settings_file, state_folder
from engine.gpus.current_use import find_current_use
from engine.runs.batch.states import found_engines
from support.gputrain_command import GPUTRAIN
from support.messages import says
from support.screen.demo_app import FROZEN_NOW, demo_app, demo_snapshot, toasts, visible_text, wait_until
from support.screen.form_driver import form_of, type_into
from support.screen.screen_driver import drive, press, real_app
from support.servers.slurm_stand_in import SlurmStandIn
from support.servers.ssh_stand_in import SshStandIn
from tui.form.fields import HOST_KEY
from tui.form.model import Form, load_last_form, save_last_form
from tui.screens.form import FormScreen
from tui.screens.monitor import MonitorScreen
from tui.screens.widgets.field_lines import FieldEntry

pytestmark = pytest.mark.usefixtures("isolated_folder")


# Values and checks


def test_form_screen_marks_invalid_values_and_refuses_start(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "0")
        assert says(visible_text(pilot, "#about"), "out-of-range", "✗ 0 ", "1")
        await type_into(pilot, "data.batch_size", "x")
        assert "✗ 2 errors to fix" in visible_text(pilot)
        assert "✗ epochs" in visible_text(pilot) and "✗ batch size" in visible_text(pilot)
        assert says(visible_text(pilot, "#plan"), "out-of-range", "✗ run.epochs: 0 ")
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


def test_form_screen_asks_before_it_starts_on_gpu_that_is_not_free(tmp_path: Path) -> None:
    snapshot, started = demo_snapshot(FROZEN_NOW), list[Sequence[str]]()
    free = next(gpu.index for gpu in snapshot.gpus if find_current_use(gpu) is None and not gpu.runs)
    busy = next(gpu.index for gpu in snapshot.gpus if "user" in str(find_current_use(gpu)))
    app: Any = real_app(tmp_path / "runs")
    app.gpu_poller.snapshot = snapshot
    app.launch = lambda arguments, **_: started.append(arguments)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "device.gpus", str(free))
        await press(pilot, "ctrl+s")
        assert len(started) == 1
        await type_into(pilot, "device.gpus", str(busy))
        await press(pilot, "ctrl+s")
        assert f"GPU {busy}: in use by" in visible_text(pilot)
        assert f"GPU {busy}: 61.2/79.6 GiB, fashion-17 rank 0: start there?" in visible_text(pilot)
        await press(pilot, "enter")
        assert len(started) == 1
        await press(pilot, "ctrl+s", "down", "enter")
        assert len(started) == 2
        form_of(pilot).edit("device.wait", "true")
        await press(pilot, "ctrl+s")
        assert len(started) == 3

    drive(app, act, (100, 30))


def test_field_that_is_emptied_has_its_default_again(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        form_of(pilot).fields.select("run.epochs")
        await press(pilot, "backspace")
        entry = pilot.app.screen.query_one(FieldEntry)
        assert (entry.value, entry.placeholder, form_of(pilot).form) == ("", "15", Form.new())
        assert "errors" not in visible_text(pilot, "#title")
        await press(pilot, "7")
        assert form_of(pilot).form.overrides == {"run.epochs": "7"}

    drive(real_app(tmp_path / "runs"), act, (100, 30))


# Leaving the form


@pytest.mark.usefixtures("unchecked")
def test_form_screen_asks_before_it_loses_changes(tmp_path: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "7")
        for keys, screen in ((["enter"], FormScreen), (["escape"], FormScreen), (["down", "enter"], MonitorScreen)):
            await press(pilot, "escape")
            assert "Discard the changes?" in visible_text(pilot)
            await press(pilot, *keys)
            assert isinstance(pilot.app.screen, screen)
            assert load_last_form() == Form("digits")

    drive(real_app(tmp_path / "runs"), act)


def test_form_screen_in_demo_starts_and_saves_nothing(demo_runs_folder: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, "run.epochs", "7")
        await press(pilot, "ctrl+s")
        assert isinstance(pilot.app.screen, FormScreen)

    drive(demo_app(demo_runs_folder), act)
    assert not (state_folder() / "form.json").exists()


@pytest.mark.usefixtures("unchecked")
def test_form_screen_says_that_it_continues_the_last_form_until_it_is_changed(tmp_path: Path) -> None:
    last, title = Form("mnist", {"run.epochs": "7"}), "last form: preset mnist, 1 change"
    save_last_form(last)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert title in visible_text(pilot, "#title")
        await press(pilot, "ctrl+r")
        assert form_of(pilot).form == Form.new()
        assert "last form" not in visible_text(pilot, "#title")
        await press(pilot, "ctrl+r")
        assert form_of(pilot).form == last and title in visible_text(pilot, "#title")

    drive(real_app(tmp_path / "runs"), act)


# Other hosts and batch systems


def test_form_submits_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = SlurmStandIn(tmp_path / "slurm", monkeypatch)
    monkeypatch.setattr("tui.screens.launcher.gputrain_command", lambda: [GPUTRAIN])
    monkeypatch.setattr("tui.screens.form.found_engines", found_engines)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, HOST_KEY, "slurm")
        await type_into(pilot, "device.gpus", "cpu")
        assert "gputrain run --on slurm digits --gpus cpu" in visible_text(pilot, "#command").replace("\n", "")
        await press(pilot, "ctrl+s")
        await wait_until(pilot, lambda: any("Submitted as slurm job 7" in toast for toast in toasts(pilot)))
        assert "run --headless digits --gpus cpu" in slurm.script

    drive(real_app(tmp_path / "runs"), act, (140, 40))


def test_form_starts_on_other_host_without_checks_of_this_one(
    tmp_path: Path, ssh: SshStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_file()
    settings.parent.mkdir(parents=True)
    settings.write_text("hosts: [lab1, lab2]\n")
    ssh.set_host("lab2", "echo Permission denied '(publickey).' >&2; exit 255")
    monkeypatch.setattr("tui.screens.launcher.gputrain_command", lambda: [GPUTRAIN])

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        await type_into(pilot, HOST_KEY, "lab2")
        await type_into(pilot, "device.gpus", "7")
        assert "lab2: it is checked when it starts there" in visible_text(pilot, "#plan")
        assert "gputrain run --on lab2 digits --gpus 7" in visible_text(pilot, "#command").replace("\n", "")
        await press(pilot, "ctrl+s")
        await wait_until(pilot, lambda: any("lab2: Permission denied" in toast for toast in toasts(pilot)))

    drive(real_app(tmp_path / "runs"), act, (140, 40))
