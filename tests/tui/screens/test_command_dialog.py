"""The dialog that starts a command: its line, its options, and the command of an earlier run."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from engine.base.codec import replace
from engine.base.errors import UsageError
from engine.gpus.current_use import find_current_use
from engine.jobs.command.spec import write_command
from support.runs.command_folder import make_command_finished, make_command_run
from support.runs.command_owner import make_command
from support.screen.demo_app import demo_snapshot, wait_until_idle
from support.screen.screen_driver import Drive, drive, press, real_app, type_keys
from tui.screens.command_dialog import CommandDialog, line_of_run
from tui.screens.dialogs import ChoiceDialog

pytestmark = pytest.mark.usefixtures("isolated_folder")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_command_run(tmp_path / "runs", "a", make_command_finished(time.time()), now=time.time())
    return tmp_path / "runs"


def show(root: Path, act: Drive) -> list[Sequence[str]]:
    """Open the dialog, and return the arguments of what was started."""
    app: Any = real_app(root)
    started: list[Sequence[str]] = []
    app.launch = lambda arguments: started.append(arguments)

    async def open_and_act(pilot: Pilot[None]) -> None:
        await press(pilot, "n", "f2")
        assert isinstance(pilot.app.screen, CommandDialog)
        await act(pilot)
        await wait_until_idle(pilot)

    drive(app, open_and_act, (100, 30))
    return started


def test_command_and_options_are_started_as_typed_and_can_be_corrected(root: Path) -> None:
    async def act(pilot: Pilot[None]) -> None:
        await type_keys(pilot, *"echo 'a b'", "tab", *"--gpus cpx", "enter")
        await press(pilot, "f2", "tab", "end", "backspace", "u", "enter")

    [*_, started] = show(root, act)
    assert started == ["run", "--headless", "--gpus", "cpu", "--", "echo", "a b"]


@pytest.mark.parametrize(
    ("options", "is_asked"),
    [("--gpus {}", True), ("device.gpus={}", True), ("--gpus {} --queue", False)],
)
def test_command_on_gpu_that_is_not_free_is_started_after_a_question(root: Path, options: str, is_asked: bool) -> None:
    busy = next(gpu for gpu in demo_snapshot(0.0).gpus if find_current_use(gpu) is not None)

    async def act(pilot: Pilot[None]) -> None:
        pilot.app.gpu_poller.snapshot = demo_snapshot(0.0)  # type: ignore[attr-defined]
        await type_keys(pilot, *"true", "tab", *options.format(busy.index), "enter")
        assert isinstance(pilot.app.screen, ChoiceDialog) is is_asked
        await press(pilot, "enter")

    assert len(show(root, act)) == (0 if is_asked else 1)


def test_new_run_asks_for_a_command_where_trainings_are_not_installed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.base.libraries.find_spec", lambda name: None)
    app: Any = real_app(root)

    async def act(pilot: Pilot[None]) -> None:
        await press(pilot, "n")
        assert isinstance(pilot.app.screen, CommandDialog)
        assert any("pip install" in each.message for each in pilot.app._notifications)

    drive(app, act, (100, 30))


def test_again_offers_the_command_of_a_run_with_its_options(root: Path) -> None:
    folder = make_command_run(root, "b", make_command_finished(time.time()), now=time.time())
    folder.config.write_text("run:\n  name: b\ndevice:\n  gpus: free:2\n  wait: true\nqueue:\n  time_limit: 60\n")
    command = make_command(root, "echo", "a b", stop_signal="SIGTERM", parse=("loss (?P<loss>.*)",))
    command = replace(command, on_resume=("--resume", "auto"))
    write_command(folder, command)
    line = line_of_run(folder)
    assert line.words == "echo 'a b'"
    expected = ["--gpus", "free:2", "--queue", "--time-limit", "60", "--cwd", str(root), "--stop-signal", "SIGTERM"]
    assert shlex.split(line.options) == [
        *expected,
        "--on-resume",
        "--resume auto",
        "--parse",
        "loss (?P<loss>.*)",
    ]


def test_command_that_others_can_change_is_not_offered(root: Path) -> None:
    folder = make_command_run(root, "c", make_command_finished(time.time()), now=time.time())
    folder.command.chmod(0o666)
    with pytest.raises(UsageError) as refused:
        line_of_run(folder)
    assert refused.value.problems[0].code == "untrusted-code"
